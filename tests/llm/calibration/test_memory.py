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
        (192, 128, None, 32),  # 85 would keep the GPU busy
        (576, 128, None, 32),  # 28
        (640, 128, None, 32),  # 25.6
        (896, 128, None, 16),  # 18.3
        (1152, 128, None, 16),  # 14.2
        (2304, 128, None, 8),  # 7.1
        (3072, 128, None, 4),  # 5.3
        (4096, 128, None, 4),
        (8192, 128, None, 2),
        (640, 100, None, 25),
        (640, 127, None, 25),  # nothing divides it
        (640, 5, None, 25),  # fewer than go at once anyway
        (640, 128, 8, 8),
        (640, 6, 4, 3),
    ],
)
def test_all_passes_are_of_one_size_where_that_costs_little(width, count, most, together):
    windows = [torch.zeros(2048, dtype=torch.int64)] * count
    assert windows_together(Embedded(width), windows, torch.device("cuda", 0), most) == together
    assert windows_together(Embedded(width), windows, torch.device("cpu"), most) == 1
