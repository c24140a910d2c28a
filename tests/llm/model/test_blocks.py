"""Weights that are not finite are found, wherever they lie."""

import pytest
import torch

from qprecon.llm.model.blocks import check_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_found(bad, dtype):
    tensor = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    largest = torch.finfo(dtype).max
    tensor[0, :2] = torch.tensor([largest, -largest], dtype=dtype)
    others = [("wide", torch.full((2,), torch.finfo(torch.float64).max, dtype=torch.float64)), ("ends", tensor.t()[::3])]
    check_finite([("a", tensor), *others])
    for place in ((0, 0), (1, 517), (2, 999)):
        spoiled = tensor.clone()
        spoiled[place] = bad
        for each in (torch.nn.Parameter(spoiled), spoiled.t()):
            with pytest.raises(ValueError, match="^b holds weights that are not finite"):
                check_finite([("a", tensor), *others, ("b", each), ("c", spoiled)])


def test_nothing_is_finite():
    check_finite([])
    empty = [("none", torch.empty(0)), ("rows", torch.empty(0, 3, dtype=torch.bfloat16))]
    check_finite([*empty, ("meta", torch.empty(3, device="meta"))])
