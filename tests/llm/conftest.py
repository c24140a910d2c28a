"""Which tests run a second time, beside another version of transformers: `pytest tests/llm --other-transformers`."""

import pytest

WHOLE = {"", "calibration", "evaluation", "files", "model"}  # they call transformers, or read what it reads
ONE_CASE = {"lowbit", "pruning", "recovery", "statistics", "storage"}  # they run on its models, with settings that it never sees
NOT_AGAIN = {"masks", "ranks", "reporting", "settings"}  # they compute with tensors that they are given
ONE_FAMILY = {"recovery", "statistics"}  # their families are those of `pruning`, which has a case of each
# Parameters that say what transformers builds, and how it is read and written.
SEEN = {"family", "grid", "group", "group_size", "how", "make", "pickled", "place", "quantize", "streamed", "where", "whole"}


def pytest_addoption(parser):
    parser.addoption("--other-transformers", action="store_true", help="only tests whose outcome may hang on its version")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--other-transformers"):
        return
    chosen, seen = [], set()
    for item in items:
        inside = item.path.relative_to(config.rootpath / "tests" / "llm").parts
        folder = inside[0] if len(inside) > 1 else ""
        if folder in NOT_AGAIN or item.get_closest_marker("own") is not None:
            continue
        assert folder in WHOLE | ONE_CASE, f"tests/llm/conftest.py does not say whether {folder} hangs on transformers"
        key = item.nodeid.split("[")[0], *case(item, SEEN - {"family"} if folder in ONE_FAMILY else SEEN)
        if folder in WHOLE or key not in seen:
            chosen.append(item)
        seen.add(key)
    again = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in again])
    items[:] = chosen


def case(item: pytest.Item, seen: set[str]) -> list[str]:
    """What of its parameters transformers sees."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return [f"{name}={value}" for name, value in sorted(parameters.items()) if name in seen]
