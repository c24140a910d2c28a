"""The command as torchrun starts it: several processes, one run, one voice."""

import os
import socket
import sys
from types import SimpleNamespace

import pytest
import torch

from qprecon.cli import main
from qprecon.llm import PruneReport, RecoveryReport
from qprecon.llm.ranks.group import Ranks
from tests.llm.ranks.processes import needs_forks, run_apart
from tests.llm.storage.test_streaming import same, weights
from tests.llm.toy_text import toy_llama, toy_tokenizer, words

pytestmark = needs_forks


@pytest.fixture
def model(tmp_path):
    toy_llama().save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(words(400))
    return tmp_path / "model"


def command(rank, port, size, folder, name, *arguments):
    """What torchrun tells its processes; the store is the test's, as it is torchrun's own."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    arguments = [word[rank] if isinstance(word, tuple) else word for word in arguments]  # a tuple: what each rank is given
    with (folder / f"stdout {rank}").open("w") as sys.stdout, (folder / f"stderr {rank}").open("w") as sys.stderr:
        return main([name, *map(str, arguments), "--progress", "json", "--device", "cpu"])


def launched(size, folder, *arguments, name="prune"):
    """Exit codes, and what each process wrote to stdout and to stderr."""
    codes = run_apart(size, command, size, folder, name, *arguments)
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
    assert len(lines) == 1 and ("rank " in lines[0]) == ("--targets" in flags)  # the others are in what all were given
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
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert main(["eval", str(model), "--text", str(tmp_path / "text.txt")]) == 2
    assert "takes one process" in capsys.readouterr().err


def test_recover_is_one_run_too(model, tmp_path):
    flags = ("--calib", tmp_path / "text.txt", "--nsamples", 6, "--seqlen", 32)
    assert main(["prune", *map(str, (model, tmp_path / "pruned", *flags)), "--preset", "fast", "--quiet"]) == 0
    flags = (tmp_path / "pruned", model, *flags) + ("--passes", 2, "--batch", 2, "--lr", 1e-3, "--save-masks")
    assert main(["recover", *map(str, (*flags[:2], tmp_path / "one", *flags[2:])), "--quiet"]) == 0
    codes, said, shown = launched(2, tmp_path, *flags[:2], tmp_path / "two", *flags[2:], name="recover")
    assert codes == [0, 0], shown
    assert "weights trained" in said[0] and said[1] == ""
    assert '"done"' in shown[0] and '"done"' not in shown[1]
    own, expected = weights(tmp_path / "two"), weights(tmp_path / "one")
    assert own.keys() == expected.keys() and not same(expected, weights(tmp_path / "pruned"))
    assert all(torch.allclose(own[name], expected[name], atol=1e-5) for name in own)
    assert all(torch.equal(own[name] == 0, expected[name] == 0) for name in own)
    assert RecoveryReport.load(tmp_path / "two").world_size == 2
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == sorted(path.name for path in (tmp_path / "one").iterdir())


def test_bad_input_of_recover_is_one_line(model, tmp_path):
    codes, said, shown = launched(2, tmp_path, model, model, tmp_path / "out", "--calib", tmp_path / "text.txt", name="recover")
    lines = [line for text in shown for line in text.splitlines() if "error" in line]
    assert 0 not in codes and said == ["", ""] and len(lines) == 1 and "rank " in lines[0] and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("flag", "values", "said"), [
    ("--sparsity", (0.5, 0.6), ["--sparsity 50%", "--sparsity 60%"]), ("--seed", (0, 1), ["--seed 0", "--seed 1"]),
    ("--mask-option", ("block_size=32", "block_size=64"), ["--mask-option block_size=32", "--mask-option block_size=64"]),
])  # fmt: skip
def test_ranks_with_different_settings_are_named(flag, values, said, model, tmp_path):
    """Each would prune its layers by its own, and the report tell those of rank 0."""
    more = ("--mask", "sparsegpt") if flag == "--mask-option" else ()
    codes, _, shown = launched(2, tmp_path, model, tmp_path / "out", "--calib", tmp_path / "text.txt", flag, values, *more)
    lines = [line for text in shown for line in text.splitlines() if "error" in line]
    assert 0 not in codes and len(lines) == 1 and not (tmp_path / "out").exists()
    assert all(word in lines[0] for word in [*said, "rank 0 has", "rank 1 has"]), lines


def test_ranks_that_recover_with_different_settings_are_named(model, tmp_path):
    flags = ("--calib", tmp_path / "text.txt", "--lr", (1e-4, 1e-3))
    codes, _, shown = launched(2, tmp_path, model, model, tmp_path / "out", *flags, name="recover")
    lines = [line for text in shown for line in text.splitlines() if "error" in line]
    assert 0 not in codes and len(lines) == 1 and all(word in lines[0] for word in ("--lr 0.0001", "--lr 0.001", "rank 1")), lines


def test_the_same_settings_are_the_same_in_every_process():
    """Sets have an order of each process, and objects an address."""
    ranks = Ranks(0, 2)
    told = []
    object.__setattr__(ranks, "meeting", SimpleNamespace(gathered=lambda what: told.append(what) or [what, what]))
    ranks.check_same({"train": {"b", "a"}, "masks": object(), "dtype": torch.float16, "nan": float("nan")})
    assert told == [{"train": '["a", "b"]', "masks": '"object"', "dtype": '"torch.float16"', "nan": "NaN"}]
