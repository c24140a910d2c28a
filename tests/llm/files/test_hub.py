"""Names that cannot be had are refused soon; what may be on the hub is left to its libraries. No test needs a network."""

import sys
import time
import types
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import huggingface_hub
import pytest

from qprecon.cli import main
from qprecon.llm import PruneReport, prune_model
from qprecon.llm.calibration.texts import load_texts
from qprecon.llm.files.folders import model_folder
from qprecon.llm.files.hub import ask_hub, hub_answers, is_hub_name, offline_if_silent
from qprecon.llm.model.loading import load_causal_lm
from tests.faults.network import HANGS
from tests.faults.network import hub as hanging
from tests.llm.toy_text import toy_llama, toy_tokenizer, words


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.1-8B", "allenai/c4", "some_one/v1.0-GGUF", "a.b"])
def test_names_of_the_hub(name):
    assert is_hub_name(name)


@pytest.mark.parametrize(
    "name",
    ["./m", "../m", "/m", "~/m", "~", ".", "a/b/c", "m/", "/", "a\\b", "two words", "x/model.safetensors", "X.TXT", "c.gguf", ""],
)
def test_paths(name):
    assert not is_hub_name(name)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Sets the hub's address; no copies of anything are here."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return lambda port: monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}")


def test_without_an_answer_names_are_refused_soon(hub, monkeypatch):
    hub(9)  # nobody listens there
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=None))
    monkeypatch.setitem(sys.modules, "datasets.config", types.SimpleNamespace(HF_DATASETS_CACHE="nowhere"))
    started = time.monotonic()
    for load in (load_causal_lm, model_folder):
        with pytest.raises(OSError, match="no folder 'someone/model' here.*hub does not answer"):
            load("someone/model")
    for name in ("c4", "someone/texts"):
        with pytest.raises(OSError, match=f"'{name}'.*hub does not answer.*builtin"):
            load_texts(name)
    assert time.monotonic() - started < 20  # the libraries take half a minute for one


def test_paths_ask_nobody(hub, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *a, **k: pytest.fail("the hub was asked"))
    (tmp_path / "file").write_text("no folder")
    for load in (load_causal_lm, model_folder):
        for name in ("a/b/c", "models/x.safetensors", "./x", "x/"):
            with pytest.raises(FileNotFoundError, match="no such model folder"):
                load(name)
        with pytest.raises(FileNotFoundError, match=f"{tmp_path / 'file'} is a file"):
            load(tmp_path / "file")
        with pytest.raises(ValueError, match="name is empty"):
            load("")
    for name in ("a/b/c", "texts.parquet", "./x", "x/"):
        with pytest.raises(FileNotFoundError, match="no such text file"):
            load_texts(name)


def test_a_copy_that_is_here_needs_no_answer(hub, tmp_path):
    hub(9)
    (tmp_path / "cache" / "models--someone--model" / "snapshots").mkdir(parents=True)
    ask_hub("someone/model", "model")
    with pytest.raises(OSError, match="does not answer"):
        ask_hub("someone/other", "model")


def test_offline_on_purpose_is_left_to_the_libraries(hub, monkeypatch):
    hub(9)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    ask_hub("someone/model", "model")


@pytest.mark.parametrize("hang", HANGS[:2])
def test_a_hub_that_stops_in_its_answer_is_silent(hub, monkeypatch, hang):
    monkeypatch.setattr("qprecon.llm.files.hub._SECONDS", 0.5)
    with hanging(hang) as address:
        hub(int(address.rpartition(":")[2]))
        assert not hub_answers()
        with pytest.raises(OSError, match="no folder 'someone/model' here.*hub does not answer"):
            load_causal_lm("someone/model")


def test_a_hub_that_answers_is_left_to_the_libraries(hub):
    class Missing(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

        do_HEAD = do_GET

    with HTTPServer(("127.0.0.1", 0), Missing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        hub(server.server_port)
        ask_hub("someone/model", "model")
        assert hub_answers()
        server.shutdown()


def test_a_silent_hub_is_left_alone_for_a_while(hub):
    reason = "datasets is missing (pip install 'qprecon[eval]') or needs another hub library"
    datasets_config = pytest.importorskip("datasets.config", reason=reason, exc_type=ImportError)
    hub(9)
    assert not hub_answers()
    before = datasets_config.HF_HUB_OFFLINE
    with pytest.raises(KeyError), offline_if_silent():
        assert huggingface_hub.constants.HF_HUB_OFFLINE and datasets_config.HF_HUB_OFFLINE
        raise KeyError
    assert not huggingface_hub.constants.HF_HUB_OFFLINE and datasets_config.HF_HUB_OFFLINE == before


def test_a_folder_of_texts_is_no_name(monkeypatch, tmp_path):
    asked = []

    def load_dataset(path, **_):
        asked.append(path)
        return types.SimpleNamespace(take=lambda count: [{"text": "words"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    (tmp_path / "train.parquet").touch()
    assert load_texts(tmp_path) == ["words"] and asked == [str(tmp_path)]


@pytest.fixture
def cached(hub, tmp_path):
    """A model whose files are all in the cache, as the hub's library leaves them."""
    hub(9)
    copy = tmp_path / "cache" / "models--someone--model"
    snapshot = copy / "snapshots" / ("a" * 40)
    toy_llama().save_pretrained(snapshot)
    toy_tokenizer().save_pretrained(snapshot)
    (snapshot / "LICENSE").write_text("of someone")
    (copy / "refs").mkdir()
    (copy / "refs" / "main").write_text("a" * 40)
    return snapshot


def test_a_model_that_is_all_here_needs_no_network(cached, tmp_path, monkeypatch):
    """Every command, in seconds: nobody is asked a second time."""
    (tmp_path / "text.txt").write_text(words(400))
    monkeypatch.chdir(tmp_path)
    started = time.monotonic()
    assert model_folder("someone/model") == cached
    model, tokenizer = load_causal_lm("someone/model")
    assert tokenizer("w1")["input_ids"] and model.config._name_or_path == "someone/model"
    options = ["--nsamples", "2", "--seqlen", "16", "--update", "none", "--quiet"]
    assert main(["prune", "someone/model", "out", "--calib", "text.txt", *options]) == 0
    assert main(["eval", "someone/model", "--text", "text.txt", "--seqlen", "16", "--quiet"]) == 0
    assert time.monotonic() - started < 30
    assert (tmp_path / "out" / "LICENSE").read_text() == "of someone"
    report = PruneReport.load(tmp_path / "out")
    assert report.settings["model"] == "someone/model" and report.settings["streamed"]
    # in memory, what lies beside the weights is found by the model's name
    prune_model(model, [tokenizer("w1 w2 w3", return_tensors="pt")["input_ids"]], out="memory", progress=False, update="none")
    assert (tmp_path / "memory" / "LICENSE").is_file()


def test_a_copy_that_is_not_complete_is_named(cached):
    (cached / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"models--someone--model.*holds no weights"):
        load_causal_lm("someone/model")


def test_offline_on_purpose_a_copy_is_all_that_is_looked_at(cached, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("qprecon.llm.files.hub.hub_answers", lambda: pytest.fail("the hub was asked"))
    assert load_causal_lm("someone/model")[1] is not None
    with pytest.raises(OSError, match="HF_HUB_OFFLINE.*no complete copy"):
        load_causal_lm("someone/other")
