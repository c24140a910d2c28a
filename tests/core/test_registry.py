"""Backends of third parties, and what is said of those that are missing, broken or in the way."""

import dataclasses
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qprecon
from qprecon.contract import Backend, RawColumns, registry
from qprecon.contract.options import check_values
from tests.small_problems import check_against_cholesky, check_limits, problem

GUIDE = Path(__file__).parents[2] / "docs" / "extending" / "adding_a_backend.md"


def block(language: str) -> str:
    return re.search(rf"```{language}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL).group(1)


def plain(name: str, **fields) -> str:
    arguments = "".join(f", {key}={value!r}" for key, value in fields.items())
    return f"from qprecon.contract import Backend\nRECORD = Backend({name!r}, {name!r} + '_target', 'a test'{arguments})\n"


def test_the_guide_is_short():
    assert len(block("python").strip().splitlines()) < 40


def test_the_guide_works(install):
    group, name, value = re.search(r'entry-points\."(.+?)"\]\n(\w+) = "(.+?)"', block("toml")).groups()
    assert group == registry.ENTRY_POINT_GROUP
    install("descent", block("python"), f"{name} = {value}")
    assert qprecon.available_backends()["descent"]["installed"]
    solution = check_against_cholesky("descent")
    assert set(solution.reported_status[:-1]) == {"solved"}
    check_limits("descent")
    h, w, mask = problem()
    with pytest.raises(ValueError, match="did you mean 'sweeps'"):
        qprecon.solve(h, w, mask, backend="descent", sweep=3)
    with pytest.raises(qprecon.UnsupportedError, match="bounds"):
        qprecon.solve(h, w, mask, backend="descent", lower=0.0)


@pytest.mark.parametrize("name", ["cholesky", "twice"])
def test_duplicates_are_refused(install, name):
    install("one", plain(name), f"{name} = one:RECORD", "first")
    if name == "twice":
        install("two", plain(name), f"{name} = two:RECORD", "second")
    h, w, mask = problem()
    listed = qprecon.available_backends()
    assert "exists already" in listed[f"{name} (entry point)"]["summary"] and not listed[f"{name} (entry point)"]["installed"]
    assert listed["cholesky"]["installed"] and ("twice" in listed) is False
    install("fine", plain("fine"), "fine = fine:RECORD", "another")
    assert qprecon.available_backends()["fine"]["summary"] == "a test" and registry.find("fine").name == "fine"  # stopped by nobody
    if name == "twice":
        with pytest.raises(ValueError, match="twice.*exists already"):
            qprecon.solve(h, w, mask, backend="twice")
    # a built-in backend is never replaced, and works on without a look at entry points
    assert (qprecon.solve(h, w, mask, backend="cholesky").status == qprecon.Status.OPTIMAL).all()


def test_missing_and_broken_are_told_apart(install):
    install("absent", plain("absent", requires=("no_such_module",)), "absent = absent:RECORD", "first")
    install("crooked_target", "raise KeyError('surprise')\n", "", "second")
    install("crooked", plain("crooked"), "crooked = crooked:RECORD", "third")
    h, w, mask = problem()
    listed = qprecon.available_backends()
    assert not listed["absent"]["installed"] and listed["absent"]["missing"] == ["no_such_module"]
    with pytest.raises(qprecon.BackendNotInstalledError, match="no_such_module"):
        qprecon.solve(h, w, mask, backend="absent")
    with pytest.raises(qprecon.BackendBrokenError, match="KeyError.*surprise") as caught:
        qprecon.solve(h, w, mask, backend="crooked")
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    "options, said",
    [
        ("Options = dict", "its options should be a dataclass, not <class 'dict'>"),
        ("@dataclass\nclass Options:\n    def __post_init__(self):\n        1 / 0\n", "its options cannot be made: ZeroDivision"),
    ],
)
def test_options_that_are_broken_are_the_backends_fault(install, options, said):
    source = f"from dataclasses import dataclass\ndef prepare(system, options): pass\n{options}\n"
    install("crooked_target", source, "", "first")
    install("crooked", plain("crooked"), "crooked = crooked:RECORD", "second")
    with pytest.raises(qprecon.BackendBrokenError, match=f"backend 'crooked': {said}"):
        qprecon.solve(*problem(), backend="crooked")


def test_a_module_that_is_missing_is_told_without_an_import(install):
    install("hollow", plain("hollow"), "hollow = hollow:RECORD", "first")
    with pytest.raises(qprecon.BackendBrokenError, match="backend 'hollow' is installed, but there is no module 'hollow_target'"):
        registry.check_usable("hollow")
    for record in registry.BUILT_IN:
        if record.installed:
            registry.check_usable(record.name)


def test_missing_extra_is_named(monkeypatch):
    needy = dataclasses.replace(registry.find("osqp"), requires=("no_such_module",))
    monkeypatch.setattr(registry, "BUILT_IN", (needy,))
    h, w, mask = problem()
    with pytest.raises(qprecon.BackendNotInstalledError, match=re.escape("pip install 'qprecon[osqp]'")):
        qprecon.solve(h, w, mask, backend="osqp")


def test_a_broken_third_party_stops_nobody_else(install):
    install("shattered", "1 / 0\n", "shattered = shattered:RECORD")
    h, w, mask = problem()
    assert (qprecon.solve(h, w, mask, backend="cholesky").status == qprecon.Status.OPTIMAL).all()
    with pytest.raises(qprecon.BackendBrokenError, match="shattered.*ZeroDivisionError"):
        qprecon.solve(h, w, mask, backend="shattered")


def test_a_record_must_be_one(install):
    install("odd", "RECORD = 'no record'\n", "odd = odd:RECORD")
    h, w, mask = problem()
    with pytest.raises(qprecon.BackendBrokenError, match="not a qprecon Backend"):
        qprecon.solve(h, w, mask, backend="odd")


def test_unknown_names_get_a_hint():
    h, w, mask = problem()
    with pytest.raises(qprecon.UnknownBackendError, match="did you mean 'cholesky'"):
        qprecon.solve(h, w, mask, backend="cholesk")
    with pytest.raises(qprecon.UnknownBackendError, match="Known: auto"):
        qprecon.solve(h, w, mask, backend="zzz")


def test_options_can_override_scaling_and_warm_start(monkeypatch):
    """A mode of a backend may ask for the problem as given."""
    seen = []

    def prepare(system, options):
        def solve_chunk(chunk):
            seen.append((np.diag(system.hessian_NN), chunk.weights_NK))
            return RawColumns(chunk.start_NK)

        return solve_chunk

    @dataclasses.dataclass(frozen=True)
    class Options:
        raw: bool = False

        @property
        def scaling(self):
            return "none" if self.raw else None

    record = Backend("probe", "probe_target", "a test")
    monkeypatch.setitem(sys.modules, "probe_target", type(sys)("probe_target"))
    sys.modules["probe_target"].prepare, sys.modules["probe_target"].Options = prepare, Options
    monkeypatch.setattr(registry, "BUILT_IN", (*registry.BUILT_IN, record))
    h, w, mask = problem()
    for raw in (False, True):
        qprecon.solve(1e4 * h, w, mask, backend="probe", raw=raw)
    assert (0.5 < seen[0][0]).all() and (seen[0][0] < 2.0).all()
    assert np.allclose(seen[-1][0], 1e4 * np.diag(h)) and np.array_equal(seen[-1][1], w[:, :-1])


def test_values_of_options_are_held_to_their_types():
    def declared(*, a: Any, b: bool = True, c: tuple[int, ...] = (), d: Mapping[str, float] | Path | None = None, e=1): ...

    check_values("x", {"a": object(), "b": np.True_, "c": [np.int64(1), 2], "d": {}, "e": "anything", "f": "unknown"}, declared)
    check_values("x", {"c": (), "d": Path()}, declared)
    for wrong, words in (
        ({"b": 1}, "x: b must be True or False, got 1"),
        ({"c": [1, True]}, r"x: c must be a list of whole numbers, got \[1, True\]"),
        ({"d": "no"}, "x: d must be a mapping or a Path or None, got 'no'"),
    ):
        with pytest.raises(ValueError, match=words):
            check_values("x", wrong, declared)
