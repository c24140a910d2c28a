"""How many windows go through a block at once."""

import pytest
import torch
from torch import nn

from qprecon.llm.calibration.memory import windows_together

pytestmark = pytest.mark.own


class Embedded:
    def __init__(self, width):
        self.width = width

    def get_input_embeddings(self):
        return nn.Embedding(2, self.width)


@pytest.mark.parametrize(
    ("width", "count", "most", "together"),
    [
        (576, 128, None, 16),  # 14.2 would keep the GPU busy
        (640, 128, None, 16),  # 12.8
        (2304, 128, None, 4),  # 3.6
        (3072, 128, None, 2),  # 2.7
        (4096, 128, None, 2),
        (8192, 128, None, 1),
        (640, 100, None, 10),
        (640, 127, None, 12),  # nothing divides it
        (640, 5, None, 12),  # fewer than go at once anyway
        (640, 128, 8, 8),
        (640, 6, 4, 3),
    ],
)
def test_all_passes_are_of_one_size_where_that_costs_little(width, count, most, together):
    windows = [torch.zeros(2048, dtype=torch.int64)] * count
    assert windows_together(Embedded(width), windows, torch.device("cuda", 0), most) == together
    assert windows_together(Embedded(width), windows, torch.device("cpu"), most) == 1
