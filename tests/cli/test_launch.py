"""A launcher's environment that is whole, half there, left over, or leads nowhere."""

import os
import socket
import subprocess
import sys
import time

import pytest

from qprecon import cli
from qprecon.cli import _launch

WHOLE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in (*WHOLE, "TORCHELASTIC_USE_AGENT_STORE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.mark.parametrize(("environment", "rank"), [
    ({}, None), ({"MASTER_ADDR": "host", "MASTER_PORT": "1"}, None), ({"WORLD_SIZE": "1"}, None),
    ({"WORLD_SIZE": "", "RANK": ""}, None), ({"RANK": "0", "WORLD_SIZE": "1"}, None), (WHOLE | {"WORLD_SIZE": "1"}, None),
    (WHOLE, 0), (WHOLE | {"RANK": "1"}, 1),
])  # fmt: skip
def test_whose_environment_it_is(environment, rank, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _launch.launched_rank() == rank


@pytest.mark.parametrize(("changed", "said"), [
    ({"WORLD_SIZE": "two"}, ["WORLD_SIZE='two'"]), ({"RANK": "x"}, ["RANK='x'"]), ({"RANK": "-1"}, ["RANK='-1'"]),
    ({"RANK": "7"}, ["RANK=7", "WORLD_SIZE=2"]), ({"WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
    ({"RANK": "1", "WORLD_SIZE": "1"}, ["RANK=1"]),
    ({"MASTER_ADDR": None}, ["no MASTER_ADDR;"]), ({"MASTER_ADDR": ""}, ["no MASTER_ADDR;"]),
    ({"MASTER_PORT": None}, ["no MASTER_PORT;"]),
    ({"MASTER_ADDR": None, "MASTER_PORT": None}, ["RANK=0 and WORLD_SIZE=2", "no MASTER_ADDR, MASTER_PORT;"]),
    ({"RANK": None}, ["no RANK;", "unset WORLD_SIZE MASTER_ADDR MASTER_PORT;"]), ({"WORLD_SIZE": None}, ["no WORLD_SIZE;"]),
    ({"RANK": None, "MASTER_ADDR": None, "MASTER_PORT": None}, ["WORLD_SIZE=2", "unset WORLD_SIZE;"]),
    ({"MASTER_PORT": "x"}, ["MASTER_PORT='x'"]), ({"MASTER_PORT": "0"}, ["MASTER_PORT='0'"]),
    ({"MASTER_PORT": "70000"}, ["'70000'"]),
])  # fmt: skip
@pytest.mark.parametrize("command", ["prune model out", "recover pruned dense out"])
def test_a_launchers_environment_that_is_half_there_is_refused(changed, said, command, monkeypatch, capsys):
    """Each process would do all the work, into one folder, and nobody would know."""
    for name, value in (WHOLE | changed).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    assert cli.main(command.split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(word in err for word in [*said, "unset", "torchrun"]), err


def command(folder, timeout="1", patience=10):
    """`prune` of what is no model, as code and arguments: the meeting comes first."""
    code = f"import sys; from qprecon.cli import _launch, main; _launch._PATIENCE = {patience}; sys.exit(main())"
    return code, ["prune", str(folder / "model"), str(folder / "out"), "--device", "cpu", "--rank-timeout", timeout]


def how(run):
    """The exit code, stdout and stderr of a process that waits for minutes at most."""
    ended = run.ended(250)
    return ended.code, ended.out, ended.err


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("address", ["no-such-host.invalid", "127.0.0.1"])
def test_a_meeting_point_that_cannot_be_reached(address, rank, free_port, tmp_path, loaded):
    """A name that nobody has, a port where nobody listens, and, for rank 0 of the latter, a process that does not come."""
    started = time.monotonic()
    environment = WHOLE | {"RANK": rank, "MASTER_ADDR": address, "MASTER_PORT": free_port}
    code, _, err = how(loaded.start_code(*command(tmp_path), environment))
    assert code == 1 and err.count("\n") == 1 and time.monotonic() - started < 200  # torch waits for five minutes
    assert all(
        word in err for word in (f"MASTER_ADDR={address}", f"MASTER_PORT={free_port}", "WORLD_SIZE=2", f"rank {rank} waited")
    ), err
    assert "--rank-timeout 1 " in err and "unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT" in err
    assert ("rank 1 did not come" in err) == (rank == "0" and address == "127.0.0.1")


def test_fewer_processes_than_world_size_are_said_once(free_port, tmp_path, loaded):
    environment = WHOLE | {"WORLD_SIZE": "4", "MASTER_PORT": free_port}
    runs = [loaded.start_code(*command(tmp_path, timeout="4"), environment | {"RANK": rank}) for rank in "013"]
    ends = [how(run) for run in runs]
    lines = [line for _, _, err in ends for line in err.splitlines() if not line.startswith("note")]
    assert [code for code, _, _ in ends] == [1, 1, 1]
    assert len(lines) == 1 and "1 of WORLD_SIZE=4" in lines[0] and "rank 2 did not come" in lines[0], lines


def test_a_port_that_another_program_has(tmp_path, loaded):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = how(loaded.start_code(*command(tmp_path), WHOLE | {"MASTER_PORT": str(taken.getsockname()[1])}))
    assert code == 1 and err.count("\n") == 1 and "rank 0 cannot listen" in err and "another MASTER_PORT" in err


def test_processes_that_do_not_come_are_named_and_not_waited_for_in_silence(free_port, tmp_path):
    """The rest of a launcher's environment, in a shell: the command says what it waits for, and SIGTERM ends it."""
    code, flags = command(tmp_path, timeout="50", patience=0.1)
    environment = {**os.environ, **WHOLE, "MASTER_PORT": free_port}
    run = subprocess.Popen([sys.executable, "-c", code, *flags], env=environment, stderr=subprocess.PIPE, text=True)
    said = run.stderr.readline()
    run.terminate()
    _, rest = run.communicate(timeout=250)
    assert "waiting for the other processes" in said and "WORLD_SIZE=2" in said and "unset" in said
    assert run.returncode == 143 and "terminated" in rest
