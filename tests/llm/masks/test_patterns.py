from fractions import Fraction

import numpy as np
import pytest
import torch

from qprecon.llm.masks import patterns
from qprecon.llm.masks.patterns import Pattern, lowest, select_mask


@pytest.mark.parametrize(
    ("text", "fraction"),
    [
        ("50%", Fraction(1, 2)),
        (" 33.3 % ", Fraction(333, 1000)),
        ("0.7", Fraction(7, 10)),
        (0.7, Fraction(7, 10)),
        (np.float32(0.7), Fraction(7, 10)),
        (1 / 3, Fraction(1, 3)),
        (0, Fraction(0)),
        (1, Fraction(1)),
        ("2:4", Fraction(1, 2)),
        ("1:4", Fraction(3, 4)),
        (" 3 : 4 ", Fraction(1, 4)),
        ("4:4", Fraction(0)),
    ],
)
def test_parse(text, fraction):
    pattern = Pattern.parse(text)
    assert pattern.fraction == fraction
    assert Pattern.parse(pattern) is pattern
    assert Pattern.parse(str(pattern)) == pattern or fraction.denominator == 3


@pytest.mark.parametrize("bad", [1.5, -0.1, "150%", "50", float("nan"), float("inf"), "", "half", None, True, [1]])
def test_sparsity_that_makes_no_sense(bad):
    with pytest.raises(ValueError, match="sparsity|pattern"):
        Pattern.parse(bad)


def test_fifty_without_a_percent_sign_gets_a_hint():
    with pytest.raises(ValueError, match="write '50%'"):
        Pattern.parse(50)


@pytest.mark.parametrize("bad", ["5:4", "2:0", "2:4:8", "a:b", "-1:4", ":4", "2:"])
def test_nm_that_makes_no_sense_warns_of_the_other_convention(bad):
    with pytest.raises(ValueError, match="Wanda and SparseGPT count"):
        Pattern.parse(bad)


def test_check_names_the_layer():
    Pattern.parse("2:4").check(8, "q_proj")
    Pattern.parse("50%").check(10, "q_proj")
    with pytest.raises(ValueError, match=r"2:4.*q_proj.*10"):
        Pattern.parse("2:4").check(10, "q_proj")


@pytest.mark.parametrize(
    ("sparsity", "n", "k"), [(0.7, 10, 7), (0.29, 100, 29), (0.6, 64, 38), (1 / 3, 3, 1), (1, 5, 5)]
)
def test_counts_are_not_spoilt_by_binary_fractions(sparsity, n, k):
    assert Pattern.parse(sparsity).pruned_per_group(n) == k


def slow_mask(score, k):
    """Sort one group with Python's stable sort; score is a flat list in order of preference for ties."""
    order = sorted(range(len(score)), key=lambda i: score[i])
    return [i not in set(order[:k]) for i in range(len(score))]


@pytest.mark.parametrize("pattern", ["0%", "30%", "50%", "67%", "100%"])
@pytest.mark.parametrize("values", [3, 10**6])
def test_groups_against_a_sort(pattern, values):
    generator = torch.Generator().manual_seed(0)
    score = torch.randint(values, (12, 7), generator=generator).float()
    pattern = Pattern.parse(pattern)
    by_output = select_mask(score, pattern)
    by_input = select_mask(score, pattern, "input")
    for j in range(7):
        assert by_output[:, j].tolist() == slow_mask(score[:, j].tolist(), pattern.pruned_per_group(12))
    for i in range(12):
        assert by_input[i].tolist() == slow_mask(score[i].tolist(), pattern.pruned_per_group(7))
    whole = select_mask(score, pattern, "layer")
    assert whole.flatten().tolist() == slow_mask(score.flatten().tolist(), pattern.pruned_per_group(84))


@pytest.mark.parametrize("pattern", ["1:4", "2:4", "3:4", "0:4", "4:4", "4:8", "8:24", "1:1"])
@pytest.mark.parametrize("values", [3, 10**6])
def test_nm_against_a_sort(pattern, values):
    generator = torch.Generator().manual_seed(1)
    score = torch.randint(values, (24, 5), generator=generator).float()
    pattern = Pattern.parse(pattern)
    mask = select_mask(score, pattern)
    for j in range(5):
        for begin in range(0, 24, pattern.of):
            group = slice(begin, begin + pattern.of)
            assert mask[group, j].tolist() == slow_mask(score[group, j].tolist(), pattern.of - pattern.kept)


@pytest.mark.parametrize(("pattern", "zeros"), [("1:4", 24), ("3:4", 8)])
def test_n_counts_the_kept(pattern, zeros):
    mask = select_mask(torch.rand(8, 4, generator=torch.Generator().manual_seed(0)), Pattern.parse(pattern))
    assert int((~mask).sum()) == zeros


def test_equal_scores_everywhere():
    mask = select_mask(torch.ones(10, 3), Pattern.parse("50%"))
    assert not mask[:5].any() and mask[5:].all()


def test_zeros_go_first_and_count_towards_the_request():
    score = torch.rand(10, 4, generator=torch.Generator().manual_seed(0)) + 0.1
    score[2:8] = 0  # 60 % sparse already
    mask = select_mask(score, Pattern.parse("50%"))
    assert (mask.sum(0) == 5).all()
    assert mask[score > 0].all()


def test_infinite_scores_are_kept_and_nan_refused():
    score = torch.tensor([[1.0], [float("inf")], [2.0], [float("inf")]])
    assert select_mask(score, Pattern.parse("50%")).flatten().tolist() == [False, True, False, True]
    score[0] = float("nan")
    with pytest.raises(ValueError, match="1 of 4 scores is NaN"):
        select_mask(score, Pattern.parse("50%"))


def test_bad_arguments():
    with pytest.raises(ValueError, match="group must be one of"):
        select_mask(torch.ones(4, 4), Pattern.parse("50%"), "row")
    with pytest.raises(ValueError, match="inputs, outputs"):
        select_mask(torch.ones(4), Pattern.parse("50%"))
    with pytest.raises(ValueError, match="10"):
        select_mask(torch.ones(10, 4), Pattern.parse("2:4"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("group", ["output", "layer", "input"])
@pytest.mark.parametrize("pattern", ["50%", "30%", "2:4"])
def test_the_same_on_a_gpu(pattern, group):
    score = torch.randint(50, (512, 96), generator=torch.Generator().manual_seed(0)).float()
    pattern = Pattern.parse(pattern)
    assert torch.equal(select_mask(score.cuda(), pattern, group).cpu(), select_mask(score, pattern, group))


@pytest.mark.parametrize(
    "pattern, group", [("50%", "output"), ("30%", "input"), ("33.3%", "layer"), ("2:4", "output"), ("1:4", "output")]
)
def test_a_pattern_is_held_by_its_own_masks_and_not_by_denser_ones(pattern, group):
    mask = select_mask(torch.rand(24, 20, generator=torch.Generator().manual_seed(0)), Pattern.parse(pattern), group)
    assert Pattern.parse(pattern).is_held_by(mask)
    assert not Pattern.parse(pattern).is_held_by(mask | (torch.arange(20) < 5))
    assert not Pattern.parse("3:5").is_held_by(mask)


def _scores(kind, n, device):
    generator = torch.Generator().manual_seed(n)
    score = torch.randn(n, generator=generator).abs()
    if kind == "ties":
        score = (20 * score).round()
    elif kind == "zeros":
        score[torch.rand(n, generator=generator) < 0.6] = 0
    elif kind == "columns":  # a matrix of 64 columns of very different scales
        score = (score.view(-1, 64) * torch.exp(3 * torch.randn(64, generator=generator))).view(-1)
    return score.to(device)


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("kind", ["plain", "ties", "zeros", "columns"])
@pytest.mark.parametrize("n", [64 * 1000, 64 * 16384])
def test_the_kth_smallest_lies_between_a_samples_quantiles(device, kind, n, monkeypatch):
    monkeypatch.setattr(patterns, "LONG", 1000)
    score = _scores(kind, n, device)
    ordered = score.sort().values
    for k in (1, 7, n // 10, n // 2, n - 3, n):
        assert patterns.kth_smallest(score, k) == ordered[k - 1]
        assert patterns._between_quantiles(score, k) == ordered[k - 1]
        pruned = lowest(score, k)
        assert int(pruned.sum()) == k
        assert k == n or score[pruned].max() <= score[~pruned].min()


def test_a_bracket_that_misses_is_no_answer():
    """A sample of every s-th score that says nothing about the others."""
    score = torch.zeros(2**16)
    stride = 3  # gcd with the length 1; the sample's own values are all above the rest
    score[::stride] = 1 + torch.arange(len(score[::stride])) / 1000
    k = len(score) // 2
    found = patterns._between_quantiles(score, k)
    assert found is None or found == score.sort().values[k - 1]
    assert patterns.kth_smallest(score, k) == score.sort().values[k - 1]


def test_equal_scores_go_in_order_of_inputs():
    score = torch.tensor([3.0, 1.0, 1.0, 0.0, 1.0, 5.0])
    assert lowest(score, 3).tolist() == [False, True, True, True, False, False]
    both = torch.stack((score, torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0, 4.0])), 1)
    assert lowest(both, 3).T.tolist() == [[False, True, True, True, False, False], [False, False, False, True, True, True]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_scores_of_any_dtype(dtype):
    score = torch.randn(40, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    for one in (score[:, 0].contiguous(), score):
        assert bool((lowest(one, 11).sum(0) == 11).all())
