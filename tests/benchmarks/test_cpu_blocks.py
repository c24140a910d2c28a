"""The operations that a run on a CPU cannot do without, counted by hand for one block."""

from types import SimpleNamespace

from benchmarks.models.cpu_blocks import counted


def test_a_block_by_hand():
    rows = [
        SimpleNamespace(name=f"layers.0.{name}", n_inputs=n, n_outputs=k, tokens=10, iterations=3)
        for name, n, k in (("gate_proj", 4, 6), ("up_proj", 4, 6), ("down_proj", 6, 4))
    ]
    work = counted(SimpleNamespace(layers=rows))
    assert work["forward"] == 2 * 10 * (2 * 4 * 6 + 2 * 4 * 6 + 6 * 4)  # the first pass leaves the last product out
    assert work["gram"] == 9 / 16 * 2 * 10 * (4 * 4 + 6 * 6)  # gate and up share one
    assert work["solve"] == 3 * 2 * (4 * 4 * 6 + 4 * 4 * 6 + 6 * 6 * 4)
    assert work["audit"] == 2 * (5 * (4 * 4 * 6 + 4 * 4 * 6 + 6 * 6 * 4) + (4**3 + 6**3) / 3)
