"""Every kind of optimizer against plain AdamW, masks held whatever the gradients are, and what is kept of them."""

import pytest
import torch

from qprecon.llm.model.blocks import find_blocks
from qprecon.llm.model.linears import find_linears
from qprecon.llm.recovery import trained
from qprecon.llm.recovery.optimizers import BETAS, Direct, Host, Masters, make_optimizer
from qprecon.llm.recovery.pair import weight_size
from qprecon.llm.recovery.schedule import default_rate, hold_out, make_schedule
from qprecon.llm.recovery.step import CLIP, move
from qprecon.llm.recovery.trained import Held, packed, unpacked
from tests.llm.toy_text import toy_llama

pytestmark = pytest.mark.own


def problem(dtype=torch.float32):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((6, 10), (7,), (2, 3, 5))]
    masks = [torch.rand(6, 10) < 0.5, None, torch.rand(2, 3, 5) < 0.7]
    held = Held([None if mask is None else packed(mask) for mask in masks])
    held.zero_all([weight.data for weight in weights])
    return weights, masks, held


def give_gradients(weights, step):
    generator = torch.Generator().manual_seed(step)
    for weight in weights:
        (weight * (0.1 * torch.randn(weight.shape, generator=generator)).to(weight.dtype)).sum().backward()


@pytest.mark.parametrize("shape", [(1,), (7, 3), (2, 3, 5), (16,), (1, 9)])
def test_bits(shape):
    kept = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    bits = packed(kept)
    assert bits.dtype == torch.uint8 and bits.shape == (-(-kept.numel() // 8),)
    assert torch.equal(unpacked(bits, shape), kept)
    assert int(bits[0]) & 1 == int(kept.flatten()[0])


@pytest.mark.parametrize("together", [1, 9, 20, 1 << 23])
def test_all_masks_at_once_are_each_one_alone(together, monkeypatch):
    monkeypatch.setattr(trained, "TOGETHER", together)
    generator = torch.Generator().manual_seed(2)
    shapes = [(6, 10), (7,), (2, 3, 5), (16, 8), (3, 3), (4, 4), (1,)]
    masks = [None if len(shape) == 1 else torch.rand(shape, generator=generator) < 0.5 for shape in shapes]
    held = Held([None if mask is None else packed(mask) for mask in masks])
    assert held.bytes == 8 + 4 + 16 + 2 + 2
    tensors = [torch.full(shape, torch.nan) for shape in shapes]
    tensors[4] = None  # no gradient, in the midst of others
    pairs = zip(tensors, masks, strict=True)
    expected = [tensor if mask is None or tensor is None else tensor.masked_fill(~mask, 0) for tensor, mask in pairs]
    held.zero_all(tensors)
    assert tensors[4] is None
    for tensor, wanted in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind, dtype", [("float32", torch.float32), ("float32", torch.bfloat16), ("host", torch.bfloat16)])
def test_steps_are_those_of_adamw(kind, dtype):
    """On the float32 weights behind the 16-bit ones, with masked and clipped gradients of the latter."""
    weights, masks, held = problem(dtype)
    plain = [weight.detach().float().requires_grad_() for weight in weights]
    reference = torch.optim.AdamW(plain, lr=0.0, betas=BETAS, weight_decay=0.1)
    optimizer = make_optimizer(kind, weights, weight_decay=0.1, seed=0)
    assert type(optimizer) is (Host if kind == "host" else Direct if dtype == torch.float32 else Masters)
    for step in range(5):
        give_gradients(weights, step)
        generator = torch.Generator().manual_seed(step)
        for weight, mask in zip(plain, masks, strict=True):
            weight.grad = (0.1 * torch.randn(weight.shape, generator=generator)).to(dtype).float() * (1 if mask is None else mask)
        torch.nn.utils.clip_grad_norm_(plain, CLIP)
        reference.param_groups[0]["lr"] = 0.01 * (step + 1)
        reference.step()
        move(optimizer, held, 0.01 * (step + 1))
        assert all(leaf.grad is None for leaf in (*optimizer.leaves, *weights))
        for weight, value, expected, mask in zip(weights, optimizer.values(), plain, masks, strict=True):
            rtol, atol = (1e-2, 1e-3) if kind == "host" else (1e-5, 1e-6)  # the host's gradients are clipped in 16 bits
            torch.testing.assert_close(value, expected.detach(), rtol=rtol, atol=atol)
            assert torch.equal(weight.detach(), value.to(dtype))
            assert mask is None or (weight.detach()[~mask] == 0).all()
    optimizer.close()


def test_small_steps_are_not_lost_in_sixteen_bits():
    weights, _, held = problem(torch.bfloat16)
    start = weights[1].detach().clone()
    optimizer = make_optimizer("float32", weights, weight_decay=0.0, seed=0)
    for _ in range(200):
        weights[1].sum().backward()
        move(optimizer, held, 1e-5)  # below half of the last place of a weight near 1
    torch.testing.assert_close(optimizer.values()[1], start.float() - 200e-5, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["float32", "host"])
def test_micro_batches_are_summed(kind):
    weights, _, held = problem(torch.bfloat16)
    optimizer = make_optimizer(kind, weights, weight_decay=0.0, seed=0)
    for step in range(3):
        give_gradients(weights, step)
    sums = [leaf.grad for leaf in optimizer.leaves]
    for index, found in enumerate(sums):
        parts = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            parts.append([(0.1 * torch.randn(weight.shape, generator=generator)).bfloat16() for weight in weights][index])
        exact = sum(part.float() for part in parts)
        rtol, atol = (2e-2, 2e-3) if kind == "host" else (1e-6, 1e-7)
        torch.testing.assert_close(found.float(), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kind", ["float32", "host", "8bit"])
def test_masks_hold_against_any_gradient(kind):
    if kind == "8bit":
        pytest.importorskip("torchao")
    weights, masks, held = problem()
    optimizer = make_optimizer(kind, weights, weight_decay=0.5, seed=0)
    for leaf, mask in zip(optimizer.leaves, masks, strict=True):
        leaf.grad = torch.ones_like(leaf) if mask is None else torch.where(mask, 1.0, torch.nan)
    move(optimizer, held, 1.0)
    for weight, mask in zip(weights, masks, strict=True):
        assert torch.isfinite(weight).all()
        assert mask is None or ((weight.detach()[~mask] == 0).all() and (weight.detach()[mask] != 0).all())


@pytest.mark.parametrize("kind", ["float32", "host", "8bit"])
def test_a_tensor_without_gradient_stays(kind):
    if kind == "8bit":
        pytest.importorskip("torchao")
    weights, _, held = problem()
    before = weights[0].detach().clone()
    optimizer = make_optimizer(kind, weights, weight_decay=0.5, seed=0)
    (weights[1].sum() + weights[2].sum()).backward()
    move(optimizer, held, 0.1)
    assert torch.equal(weights[0].detach(), before) and not torch.equal(weights[1].detach(), problem()[0][1].detach())


@pytest.mark.parametrize("kind, dtype", [("float32", torch.float32), ("float32", torch.bfloat16), ("host", torch.bfloat16),
                                         ("8bit", torch.bfloat16)])  # fmt: skip
def test_what_is_kept_goes_on_with_the_same_bits(kind, dtype, tmp_path):
    if kind == "8bit":
        pytest.importorskip("torchao")

    def start():
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(64, 128).to(dtype)), torch.nn.Parameter(torch.randn(9).to(dtype))]
        held = Held([packed(torch.rand(64, 128) < 0.5), None])
        held.zero_all([weight.data for weight in weights])
        return weights, make_optimizer(kind, weights, weight_decay=0.1, seed=3), held

    def go(weights, optimizer, held, first, last):
        for step in range(first, last):
            give_gradients(weights, step)
            move(optimizer, held, 0.01)

    weights, optimizer, held = start()
    go(weights, optimizer, held, 0, 6)
    again, other, _ = start()
    go(again, other, held, 0, 3)
    torch.save({"values": other.values(), "state": other.state_dict()}, tmp_path / "state.pt")
    fresh, third, _ = start()
    kept = torch.load(tmp_path / "state.pt", weights_only=True)
    third.load(kept["values"], kept["state"])
    assert all(torch.equal(a, b) for a, b in zip(again, fresh, strict=True))
    torch.randn(3)  # numbers drawn elsewhere change nothing
    go(fresh, third, held, 3, 6)
    assert all(torch.equal(a, b) for a, b in zip(weights, fresh, strict=True))


@pytest.mark.parametrize("kind, dtype", [("float32", torch.float32), ("float32", torch.bfloat16), ("host", torch.bfloat16),
                                         ("8bit", torch.bfloat16)])  # fmt: skip
def test_a_restart_is_a_start_from_the_weights_given(kind, dtype):
    if kind == "8bit":
        pytest.importorskip("torchao")
    weights, _, held = problem(dtype)
    began = [weight.detach().clone() for weight in weights]
    optimizer = make_optimizer(kind, weights, weight_decay=0.1, seed=3)
    for step in range(3):
        give_gradients(weights, step)
        move(optimizer, held, 0.01)
    optimizer.restart([value.cpu() for value in began])
    assert all(torch.equal(weight, value) for weight, value in zip(weights, began, strict=True))
    assert all(torch.equal(value, was.to(value.dtype)) for value, was in zip(optimizer.values(), began, strict=True))
    fresh, _, _ = problem(dtype)
    other = make_optimizer(kind, fresh, weight_decay=0.1, seed=3)
    other.steps = 3  # the eight-bit one's stochastic rounding is drawn by the number of the step
    for step in range(3, 6):
        for own, each in ((weights, optimizer), (fresh, other)):
            give_gradients(own, step)
            move(each, held, 0.003)
    assert all(torch.equal(a, b) for a, b in zip(weights, fresh, strict=True))


def test_eight_bits_without_torchao_say_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ModuleNotFoundError, match=r"qprecon\[recover\]"):
        make_optimizer("8bit", problem()[0], 0.0, 0)


def test_the_schedule():
    schedule = make_schedule([3, 5, 7, 8, 9], passes=3, batch=2, lr=2.0, warmup=0.2, seed=1)
    assert [len(step) for step in schedule.steps] == [2, 2, 1] * 3
    for first in (0, 3, 6):
        assert sorted(index for step in schedule.steps[first : first + 3] for index in step) == [3, 5, 7, 8, 9]
    assert schedule.steps[:3] != schedule.steps[3:6]
    rates = [schedule.rate(step) for step in range(9)]
    assert rates[:3] == [1.0, 2.0, 2.0] and rates[3:] == sorted(rates[3:], reverse=True) and 0 < rates[-1] < 0.2
    assert schedule.looks == {1, 2, 3, 4, 5, 6, 7, 8, 9}
    assert make_schedule(list(range(40)), 2, 2, 1.0, 0.0, 0).looks == {10, 20, 30, 40}
    assert make_schedule([1], 1, 1, 1.0, 0.0, 0).rate(0) == 1.0


def test_a_rate_that_proves_too_high_is_lowered():
    divisor = make_schedule(list(range(40)), 2, 2, 1.0, 0.0, 0, eases=True).divisor
    assert divisor([]) == divisor([1.0]) == divisor([1.0, 1.2]) == divisor([1.0, 0.9, 1.1, 1.15]) == 1
    assert divisor([1.0, 1.3]) == divisor([1.0, 1.3, 1.15]) == divisor([1.0, 0.8, 1.3, 0.7]) == 3
    assert divisor([1.0, 1.3, 1.21]) == divisor([1.0, 1.3, 0.9, 1.21, 0.8]) == 9
    asked_for = make_schedule(list(range(40)), 2, 2, 1.0, 0.0, 0)
    assert asked_for.divisor([1.0, 2.0, 3.0]) == 1


def test_what_is_held_out():
    training, aside = hold_out(128, 0.0625, seed=0)
    assert len(aside) == 8 and sorted(training + aside) == list(range(128)) and aside != list(range(120, 128))
    assert hold_out(128, 0.0625, seed=0)[1] == aside != hold_out(128, 0.0625, seed=1)[1]
    assert [len(part) for part in hold_out(2, 0.9, 0)] == [1, 1] and [len(part) for part in hold_out(5, 0.01, 0)] == [4, 1]


def test_the_default_rate_is_a_share_of_the_weights_size():
    """Of the three real models that were looked at, 4.4e-4, 9e-5 and 3.7e-5."""
    assert [default_rate(size) for size in (0.1902, 0.0395, 0.016)] == pytest.approx([4.4e-4, 9.1e-5, 3.7e-5], rel=0.02)


def test_the_weights_size_is_the_median_over_pruned_layers():
    dense = toy_llama()
    for index, block in enumerate(dense.model.layers):
        torch.nn.init.constant_(block.mlp.up_proj.weight, 0.5 * (index + 1))
    pruned = [view for block in find_blocks(dense) for view in find_linears(block, model=dense).views if "up_proj" in view.name]
    assert len(pruned) == 2
    assert weight_size(dense, pruned) == pytest.approx(0.75) and weight_size(dense.bfloat16(), pruned[1:]) == pytest.approx(1.0)
