"""The command as torchrun starts it: several processes, one run, one voice."""

import os
import socket
import sys

import pytest

from qprecon.cli import main
from qprecon.llm import PruneReport, recover
from tests.llm.ranks.processes import needs_forks, run, run_apart
from tests.llm.storage.test_streaming import same, weights
from tests.llm.toy_text import toy_llama, toy_tokenizer, words

pytestmark = needs_forks


@pytest.fixture
def model(tmp_path):
    toy_llama().save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(words(400))
    return tmp_path / "model"


def command(rank, port, size, folder, *arguments):
    """What torchrun tells its processes; the store is the test's, as it is torchrun's own."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    with (folder / f"stdout {rank}").open("w") as sys.stdout, (folder / f"stderr {rank}").open("w") as sys.stderr:
        return main(["prune", *map(str, arguments), "--progress", "json", "--device", "cpu"])


def launched(size, folder, *arguments):
    """Exit codes, and what each process wrote to stdout and to stderr."""
    codes = run_apart(size, command, size, folder, *arguments)
    texts = [[(folder / f"{name} {rank}").read_text() for rank in range(size)] for name in ("stdout", "stderr")]
    return codes, *texts


def test_one_run_and_one_voice(model, tmp_path):
    flags = ("--calib", tmp_path / "text.txt", "--nsamples", 3, "--seqlen", 32, "--fixed-order", "--backend", "cholesky")
    assert main(["prune", *map(str, (model, tmp_path / "one", *flags)), "--quiet"]) == 0
    codes, said, shown = launched(2, tmp_path, model, tmp_path / "two", *flags)
    assert codes == [0, 0], shown
    assert "layers pruned" in said[0] and said[1] == ""
    assert '"done"' in shown[0] and '"done"' not in shown[1]
    assert same(weights(tmp_path / "two"), weights(tmp_path / "one"))
    assert PruneReport.load(tmp_path / "two").world_size == 2
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == sorted(path.name for path in (tmp_path / "one").iterdir())


@pytest.mark.parametrize("flags", [("--sparsity", 3), ("--mask", "wandaa"), ("--targets", "nowhere")])
def test_bad_input_is_one_line(model, tmp_path, flags):
    codes, said, shown = launched(2, tmp_path, model, tmp_path / "out", "--calib", tmp_path / "text.txt", *flags)
    assert 0 not in codes and said == ["", ""]
    lines = [line for text in shown for line in text.splitlines() if "error" in line]
    assert len(lines) == 1 and ("rank " in lines[0]) == ("--sparsity" not in flags)  # that is in what all were given
    assert not (tmp_path / "out").exists()


def test_a_free_port_is_no_group(monkeypatch, model, tmp_path):
    """A batch system may set some of the launcher's variables for a single process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    flags = ("--calib", tmp_path / "text.txt", "--nsamples", 2, "--seqlen", 16, "--quiet")
    assert main(["prune", *map(str, (model, tmp_path / "out", *flags))]) == 0
    assert PruneReport.load(tmp_path / "out").world_size == 1


def test_other_commands_take_one_process(model, tmp_path, monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["recover", str(model), str(model), str(tmp_path / "out")]) == 2
    assert "takes one process" in capsys.readouterr().err and not (tmp_path / "out").exists()


def in_python(rank, model):
    return recover(model, model, words(50), out=model.with_name("out"))


def test_recover_takes_one_process(model):
    assert all(isinstance(each, ValueError) and "one process" in str(each) for each in run(2, in_python, model))
