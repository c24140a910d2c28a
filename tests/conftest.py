import importlib.util
import os
import random
import sys

import pytest

# Before numpy and torch are imported: the tests are many and small, and threads that wait for one another cost many times as much.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# XLA compiles MPAX in two thirds of the time, for problems that are solved once.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

if importlib.util.find_spec("hypothesis"):  # the tests of a GPU do without
    import hypothesis

    # The same examples on every machine and in any order of the tests, also of those that are run alone.
    hypothesis.settings.register_profile("qprecon", derandomize=True, deadline=None, database=None)
    hypothesis.settings.load_profile("qprecon")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Random numbers of a test do not depend on those that ran before it, which others do in each run."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a distribution with one module and entry points on sys.path, as pip would."""
    modules = set(sys.modules)

    def put(module: str, source: str, entries: str, distribution: str = "thirdparty", group: str = "qprecon.backends") -> None:
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{entries}\n")
        (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")

    monkeypatch.syspath_prepend(tmp_path)
    yield put
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in sys.modules[name].__file__:
            del sys.modules[name]
