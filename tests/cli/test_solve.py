"""`qprecon solve`: one layer from a file."""

import os

import numpy as np
import pytest

import qprecon
from qprecon import cli


@pytest.fixture
def problem():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((40, 12))
    return dict(H=x.T @ x, W=generator.standard_normal((12, 5)), mask=generator.random((12, 5)) < 0.5)


def test_solve_writes_what_solve_returns(problem, tmp_path, capsys):
    np.savez(tmp_path / "problem.npz", **problem)
    out = tmp_path / "deep" / "result"
    command = ["solve", str(tmp_path / "problem.npz"), "-o", str(out), "--backend", "cholesky", "--damping", "0.01"]
    assert cli.main(command) == 0
    solution = qprecon.solve(**problem, backend="cholesky", damping=0.01)
    with np.load(out) as file:
        saved = dict(file)
    assert np.array_equal(saved["weights"], solution.weights)
    assert np.array_equal(saved["gap_bound"], solution.gap_bound)
    assert saved["status"].tolist() == ["OPTIMAL"] * 5
    assert "5 of 5 columns certified" in capsys.readouterr().out


def test_solve_takes_an_explicit_rhs(problem, tmp_path):
    rhs = problem["H"] @ problem["W"] + 1.0
    np.savez(tmp_path / "problem.npz", **problem, rhs=rhs)
    assert cli.main(["solve", str(tmp_path / "problem.npz"), "-o", str(tmp_path / "o.npz"), "--backend", "cholesky"]) == 0
    expected = qprecon.solve(**problem, rhs=rhs, backend="cholesky").weights
    assert np.array_equal(np.load(tmp_path / "o.npz")["weights"], expected)
    assert not np.allclose(expected, qprecon.solve(**problem, backend="cholesky").weights)


def test_gaps_are_of_the_squared_error_where_its_constant_is_in_the_file(problem, tmp_path):
    """As with qprecon.solve; without it they are of the gain."""
    x, target = np.linalg.cholesky(problem["H"]).T, np.random.default_rng(1).standard_normal((12, 5))
    problem |= {"rhs": x.T @ target, "constant": (target**2).sum(0)}
    np.savez(tmp_path / "problem.npz", **problem)
    assert cli.main(["solve", str(tmp_path / "problem.npz"), "-o", str(tmp_path / "o.npz"), "--damping", "0.01"]) == 0
    expected = qprecon.solve(**problem, damping=0.01)
    saved = np.load(tmp_path / "o.npz")
    assert np.array_equal(saved["relative_gap"], expected.relative_gap) and np.array_equal(saved["objective"], expected.objective)


def test_solve_says_by_exit_code_that_a_column_is_not_certified(problem, tmp_path):
    np.savez(tmp_path / "problem.npz", **problem)
    command = ["solve", str(tmp_path / "problem.npz"), "-o", str(tmp_path / "o.npz"), "--backend", "cholesky"]
    assert cli.main([*command, "--tol", "1e-40"]) == 1
    assert "OPTIMAL" not in np.load(tmp_path / "o.npz")["status"].tolist()
    problem["W"][0, 2] = np.nan
    np.savez(tmp_path / "problem.npz", **problem)
    assert cli.main(command) == 1
    statuses = np.load(tmp_path / "o.npz")["status"].tolist()
    assert [i for i, status in enumerate(statuses) if status != "OPTIMAL"] == [2]


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        (lambda p: p.pop("mask"), "lacks mask"),
        (lambda p: p.update(hessian=p["H"]), "unknown hessian"),
        (lambda p: p.update(H=p["H"][:, :5]), "H"),
        (lambda p: p.update(mask=p["mask"] * 2), "mask"),
        (lambda p: p["H"].__setitem__((0, 0), np.nan), "H"),
    ],
)
def test_solve_names_what_is_wrong_with_a_file(problem, tmp_path, capsys, change, culprit):
    change(problem)
    np.savez(tmp_path / "problem.npz", **problem)
    assert cli.main(["solve", str(tmp_path / "problem.npz"), "-o", str(tmp_path / "o.npz")]) == 2
    assert culprit in capsys.readouterr().err
    assert not (tmp_path / "o.npz").exists()


def test_solve_refuses_a_place_it_cannot_write_to_before_it_solves(problem, tmp_path, capsys, monkeypatch):
    np.savez(tmp_path / "problem.npz", **problem)
    (tmp_path / "file").write_text("kept")
    monkeypatch.setattr(qprecon, "solve", lambda *a, **k: pytest.fail("it was solved"))

    def refused(out):
        assert cli.main(["solve", str(tmp_path / "problem.npz"), "-o", str(out)]) == 2
        error = capsys.readouterr().err
        assert f"-o {out}" in error
        return error

    assert f"folder {tmp_path / 'file'} cannot be made (File exists" in refused(tmp_path / "file" / "o.npz")
    assert f"(Not a directory: {tmp_path / 'file' / 'deep'})" in refused(tmp_path / "file" / "deep" / "o.npz")
    assert "is a folder; give the name of a file" in refused(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert f"the folder {tmp_path} is not writable" in refused(tmp_path / "o.npz")
    assert "the file is not writable" in refused(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept" and not (tmp_path / "o.npz").exists()


def test_solve_refuses_other_files(tmp_path, capsys):
    (tmp_path / "text.npz").write_text("not arrays")
    (tmp_path / "empty.npz").touch()
    np.save(tmp_path / "single.npy", np.eye(3))
    for name in ("text.npz", "empty.npz", "single.npy", "none.npz"):
        assert cli.main(["solve", str(tmp_path / name), "-o", str(tmp_path / "o.npz")]) == 2
        assert name in capsys.readouterr().err


def test_solve_does_not_overwrite_its_problem(tmp_path, capsys):
    path = tmp_path / "p.npz"
    np.savez(path, H=np.eye(3), W=np.ones((3, 2)), mask=np.ones((3, 2)))
    before = path.read_bytes()
    assert cli.main(["solve", str(path), "-o", str(path)]) == 2
    assert "overwrite" in capsys.readouterr().err and path.read_bytes() == before
