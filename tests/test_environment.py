"""The environment that `make setup` builds is complete, and its pins cover what pyproject.toml asks for."""

import os
import re
from pathlib import Path

import pytest

from qprecon.contract import registry

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif("QPRECON_REQUIRE_ALL_BACKENDS" not in os.environ, reason="only `make test` installs every extra")
@pytest.mark.parametrize("name", [record.name for record in registry.BUILT_IN])
def test_no_cpu_backend_is_missing_or_broken(name):
    record = registry.find(name)
    if "cpu" in record.capabilities.devices:
        assert callable(registry.load(record, {}).prepare)


def test_every_direct_dependency_is_pinned():
    project = (ROOT / "pyproject.toml").read_text().split("[project]")[1].split("[project.scripts]")[0]
    asked = set(re.findall(r'"([A-Za-z0-9_.-]+)\s*>=', project))
    pinned = set(re.findall(r"^([A-Za-z0-9_.-]+)==", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    assert {"numpy", "torch", "pytest"} <= asked
    assert asked <= pinned


def test_make_installs_every_extra():
    project = (ROOT / "pyproject.toml").read_text()
    extras = re.findall(r"^([a-z]+) = \[", project.split("[project.optional-dependencies]")[1].split("\n[")[0], re.MULTILINE)
    extras.remove("recover")  # torchao prints to stderr when it is imported, which tests of quiet commands hear
    made = re.search(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1).split(",")
    assert sorted(made) == sorted(extras)
