"""The parts that the profiles know are functions of today's code: one that it lacks is left out without a word."""

import pytest

from benchmarks.layers import phases
from benchmarks.models import block_profile


@pytest.mark.parametrize("parts", [phases.PARTS, block_profile.PARTS], ids=["layers", "blocks"])
def test_every_part_of_a_profile_exists(parts):
    missing = [f"{owner.__name__}.{name}" for owner, name, _ in parts if not hasattr(owner, name)]
    assert not missing and len(parts) > 15
