"""Arguments of small problems."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.contract.families import FAMILIES

H = np.eye(3)
W = np.ones((3, 2))
MASK = np.ones((3, 2), dtype=bool)


def given(**more: Any) -> dict[str, Any]:
    """Those of an ordinary problem, some replaced."""
    return FAMILIES["well_conditioned"].build().arguments() | more
