"""Log-likelihoods of continuations against lm-eval's own loop, and against probabilities computed one token at a time."""

import numpy as np
import pytest
import torch

from qprecon.llm.evaluation import likelihoods
from qprecon.llm.evaluation.likelihoods import log_likelihoods
from tests.llm.toy_text import toy_llama, toy_tokenizer


@pytest.fixture(scope="module")
def model():
    return toy_llama(positions=64).eval()


def make_requests(model, count=40, seed=0):
    """Contexts of several lengths, among them shared ones with one-token choices and one that is too long for the model."""
    generator = np.random.default_rng(seed)
    draw = lambda length: [int(t) for t in generator.integers(0, model.config.vocab_size, length)]  # noqa: E731
    requests = [(draw(generator.integers(1, 30)), draw(generator.integers(1, 6))) for _ in range(count)]
    shared = draw(12)
    requests += [(shared, [choice]) for choice in (3, 4, 5, 6)] + [(shared[:-1], [shared[-1], 7])]
    return [*requests, (draw(90), draw(4)), (draw(3), draw(64))]


def answers(model, requests, **more):
    with torch.no_grad():
        how = {"device": torch.device("cpu"), "vocabulary": model.config.vocab_size, "longest": 64} | more
        found = {number: rest for number, *rest in log_likelihoods(lambda tokens: model(tokens).logits, requests, **how)}
    return [found[number] for number in range(len(requests))]


def one_by_one(model, context, continuation):
    tokens = torch.tensor([[*context, *continuation][-65:]])
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits[0, -len(continuation) :].double()
    chosen = logits.log_softmax(-1)[range(len(continuation)), continuation]
    return float(chosen.sum()), logits.argmax(-1).tolist() == list(continuation)


@pytest.mark.parametrize("rows", [1, 3, None])
def test_likelihoods_are_those_of_each_request_alone(model, rows):
    requests = make_requests(model)
    found, expected = answers(model, requests, rows=rows), [one_by_one(model, *request) for request in requests]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_greedy_continuations_are_told(model):
    context = [5, 9, 11]
    with torch.no_grad():
        first = int(model(torch.tensor([context])).logits[0, -1].argmax())
        second = int(model(torch.tensor([[*context, first]])).logits[0, -1].argmax())
    other = (second + 1) % model.config.vocab_size
    found = answers(model, [(context, [first]), (context, [first, second]), (context, [first, other])])
    assert [greedy for _, greedy in found] == [True, True, False]


def test_rows_are_shared_and_batches_bounded(model, monkeypatch):
    """One row for requests that feed the model the same tokens, and no batch above the wanted number of logits."""
    seen = []
    requests = make_requests(model)
    vocabulary = model.config.vocab_size
    monkeypatch.setattr(likelihoods, "CPU_LOGITS", 100 * vocabulary)

    def logits_of(tokens):
        seen.append(tuple(tokens.shape))
        return model(tokens).logits

    with torch.no_grad():
        list(log_likelihoods(logits_of, requests, device=torch.device("cpu"), vocabulary=vocabulary, longest=64))
    assert sum(rows for rows, _ in seen) == len({(*context, *continuation)[-65:-1] for context, continuation in requests})
    assert all(rows == 1 or rows * length <= 100 for rows, length in seen)
    assert [length for _, length in seen] == sorted((length for _, length in seen), reverse=True)


def test_a_continuation_longer_than_the_model_takes_is_refused(model):
    with pytest.raises(ValueError, match="65 tokens"):
        answers(model, [([1], [2] * 65)])


def test_lm_eval_gets_what_its_own_loop_gives(model):
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval is not installed")
    from qprecon.llm.evaluation.tasks import _adapter

    requests = [((f"c{i}", "x"), *request) for i, request in enumerate(make_requests(model))]
    # lm-eval 0.4.13 reads one token's logits from the wrong position if it shares a row with a continuation of two.
    del requests[44]
    own = huggingface.HFLM(pretrained=model, tokenizer=toy_tokenizer(), batch_size=4)
    ours = _adapter(False, None)(pretrained=model, tokenizer=toy_tokenizer(), batch_size=1)
    assert own.max_length == ours.max_length == 64
    expected = own._loglikelihood_tokens(requests, disable_tqdm=True)
    found = ours._loglikelihood_tokens(requests, disable_tqdm=True)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
