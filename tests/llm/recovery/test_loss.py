"""The loss in chunks against the plain formulas, and a model in two parts against itself."""

import pytest
import torch

from qprecon.llm.model.parts import split
from qprecon.llm.recovery.loss import BYTES_AN_ENTRY, backward_through_head, chunk_rows, divergence, held_out_sums, hidden_loss
from qprecon.llm.recovery.step import Distillation, add_gradients, stacked
from tests.llm.families import FAMILIES, VOCAB, build, tokens
from tests.llm.recovery.pruned import pair


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergence_and_its_gradient_are_those_of_autograd(temperature):
    torch.manual_seed(0)
    student, teacher = (5 * torch.randn(7, 11, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    p = torch.softmax(teacher / temperature, -1)
    expected = temperature**2 * (p * (p.log() - torch.log_softmax(student / temperature, -1))).sum()
    expected.backward()
    loss, gradient = divergence(student.detach(), teacher, temperature)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, student.grad, rtol=1e-10, atol=1e-14)
    assert divergence(teacher, teacher, temperature)[0] == 0


def test_sixteen_bit_logits_are_compared_in_float32():
    torch.manual_seed(0)
    student, teacher = (10 * torch.randn(4, 300).bfloat16() for _ in range(2))
    loss, gradient = divergence(student, teacher, 3.0)
    exact = divergence(student.double(), teacher.double(), 3.0)
    assert loss.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient.double(), exact[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_chunks_give_what_the_whole_gives(rows):
    torch.manual_seed(0)
    head, other = torch.nn.Linear(6, 9).double(), torch.nn.Linear(6, 9).double()
    student, teacher = (torch.randn(10, 6, dtype=torch.float64) for _ in range(2))
    leaf = student.clone().requires_grad_()
    expected = divergence(head(leaf).detach(), other(teacher).detach(), 1.0)[0]
    whole = torch.nn.functional.kl_div(head(leaf).log_softmax(-1), other(teacher).log_softmax(-1), reduction="sum", log_target=True)
    (0.3 * whole).backward()
    own = {name: p.grad.clone() for name, p in head.named_parameters()}
    head.zero_grad()
    loss, gradient = backward_through_head(head, other, student, teacher, 1.0, 0.3, rows)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, leaf.grad)
    for name, parameter in head.named_parameters():  # a head that is trained
        torch.testing.assert_close(parameter.grad, own[name])


def test_held_out_sums():
    torch.manual_seed(0)
    logits, target = (torch.randn(8, 5) for _ in range(2))
    numbers = torch.randint(0, 5, (8,))
    sums = held_out_sums(lambda x: x, lambda x: x, logits, target, numbers, 1.0, 3)
    expected = divergence(logits, target, 1.0)[0]
    losses = [torch.nn.functional.cross_entropy(own[:-1], numbers[1:], reduction="sum") for own in (logits, target)]
    torch.testing.assert_close(sums, torch.stack([expected, *losses]).double(), rtol=1e-5, atol=0)


def test_hidden_loss():
    own, target = [torch.ones(2, 3), torch.zeros(2, 3)], [torch.full((2, 3), 2.0), torch.ones(2, 3)]
    assert hidden_loss(own, target) == pytest.approx((0.25 + 1) / 2)


@pytest.mark.parametrize(("device", "megabytes"), [("cpu", 256), ("cuda", 2048), ("cuda:1", 2048)])
@pytest.mark.parametrize("vocabulary", [49152, 128256, 262144])
def test_a_chunk_takes_the_same_memory_whatever_the_vocabulary(device, megabytes, vocabulary):
    rows = chunk_rows(vocabulary, torch.device(device))
    assert rows * vocabulary * BYTES_AN_ENTRY <= megabytes * 2**20 < (rows + 1) * vocabulary * BYTES_AN_ENTRY


def test_a_chunk_has_a_token():
    assert chunk_rows(10**9, torch.device("cpu")) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_two_parts_is_the_model(family):
    model, numbers = build(family), tokens(2, 24)
    parts = split(model, numbers[:1, :8])
    with torch.no_grad():
        output = model(input_ids=numbers, output_hidden_states=True)
        hidden, states = parts.decode(numbers, True)
        assert hidden.shape[-1] != VOCAB  # the head is apart
        torch.testing.assert_close(parts.head(hidden[1]), output.logits[1], rtol=1e-4, atol=1e-5)
        assert len(states) == len(output.hidden_states) - 1
        torch.testing.assert_close(states[-1], output.hidden_states[-1])


def test_a_head_that_does_something_else_falls_back_to_the_whole_model():
    model = build("llama")
    forward = model.forward

    def odd(input_ids, **more):  # depends on the tokens themselves
        output = forward(input_ids=input_ids, **more)
        output.logits = output.logits + input_ids[..., None]
        return output

    model.forward = odd
    parts = split(model, tokens(1, 8))
    with torch.no_grad():
        assert torch.equal(parts.head(parts.decode(tokens(1))[0][0]), odd(tokens(1)).logits[0])


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "qwen2-moe"])
@pytest.mark.parametrize("hidden_weight", [0.0, 0.7])
def test_gradients_are_those_of_the_plain_loss(family, hidden_weight):
    model, dense = pair(family)
    wide = family != "qwen2-moe"  # grouped products have no float64
    if wide:
        model, dense = model.double(), dense.double()
    numbers = tokens(4)
    own, target = (m(input_ids=numbers, output_hidden_states=True) for m in (model, dense))
    p = target.logits.softmax(-1).detach()
    loss = (p * (p.log() - own.logits.log_softmax(-1))).sum(-1).mean()
    loss = loss + hidden_weight * hidden_loss(own.hidden_states[1:], [state.detach() for state in target.hidden_states[1:]])
    loss.backward()
    expected = [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    sides = split(model, numbers[:1, :8]), split(dense, numbers[:1, :8])
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    found = add_gradients(Distillation(*sides, VOCAB, hidden_weight=hidden_weight), numbers, 1.0)
    assert float(found) == pytest.approx(float(loss.detach()), rel=1e-5)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        if gradient is not None:
            rtol, atol = (1e-6, 1e-9) if wide else (1e-3, 1e-6)
            torch.testing.assert_close(parameter.grad, gradient, rtol=rtol, atol=atol)


def test_windows_of_one_length_are_stacked():
    windows = [tokens(1, length)[0] for length in (5, 5, 5, 4, 4, 5)]
    assert [tuple(batch.shape) for batch in stacked(windows, 2)] == [(2, 5), (1, 5), (2, 4), (1, 5)]
    assert torch.equal(torch.cat([batch.flatten() for batch in stacked(windows, 8)]), torch.cat(windows))
