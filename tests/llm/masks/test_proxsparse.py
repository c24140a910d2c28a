from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qprecon.llm.masks import LayerData, get_selector
from qprecon.llm.masks._prox import prox_2of4, regulariser
from qprecon.llm.masks.patterns import Pattern
from tests.fixtures import golden

learn_masks = get_selector("proxsparse").learn

LAMS = (0.05, 0.25, 1.0, 5.0)


def objective(w_NK, z_NK, lam):
    """½‖w - z‖² + lam * R of each group, float64, by its definition."""
    w, z = (a.double().reshape(-1, 4, a.shape[1]) for a in (w_NK, z_NK))
    triples = sum(w[:, [j for j in range(4) if j != i]].abs().prod(1) for i in range(4))
    return 0.5 * (w - z).square().sum(1) + lam * triples


@pytest.mark.parametrize("seed", ["s0", "s1"])
@pytest.mark.parametrize("lam", LAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operator_is_never_worse_than_the_original(seed, lam, dtype):
    data, row = golden.archive("proxsparse"), LAMS.index(lam)
    z_NK = torch.tensor(data[seed + ".z"].T.copy())
    w_NK = prox_2of4(z_NK.to(dtype), lam)
    ours = objective(w_NK, z_NK, lam).T.flatten().numpy()  # the golden order: outputs, then groups
    for reference in (data[seed + ".objective"][row], data[seed + ".best"][row]):
        assert (ours <= reference * (1 + 1e-4) + 1e-9).all()
    assert ((w_NK == 0) | (w_NK.sign() == z_NK.sign())).all()
    assert (w_NK.abs() <= z_NK.abs() + 1e-6).all()


def test_equal_weights_where_the_original_stops_too_early():
    w = prox_2of4(torch.ones(4, 1), 1.0)
    assert float(objective(w, torch.ones(4, 1), 1.0)) == pytest.approx(0.9549, abs=1e-3)  # the original: 1.0


def test_operator_against_a_grid():
    """Every point of a grid over the box, then the true minimum can't be below the grid's by more than its mesh."""
    z = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)) * 1.5
    axis = torch.linspace(0, 1, 16)
    for lam in (0.2, 1.0, 3.0):
        ours = objective(prox_2of4(z, lam), z, lam)[0]
        for j in range(8):
            points = torch.cartesian_prod(*(axis * z[i, j] for i in range(4))).T
            best = objective(points, z[:, j : j + 1].expand_as(points), lam).min()
            assert ours[j] <= best + 1e-6


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 1e3])
def test_operator_scales(scale):
    """prox of c*z with lam/c is c times the prox of z with lam."""
    z = torch.randn(32, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for lam in (0.01, 0.3, 2.0):
        assert torch.allclose(prox_2of4(scale * z, lam / scale) / scale, prox_2of4(z, lam), atol=1e-4)


def test_operator_at_its_ends():
    z = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(prox_2of4(z, 0.0), z)
    assert not prox_2of4(torch.zeros(8, 3), 1.0).any()
    assert prox_2of4(torch.zeros(0, 3), 1.0).shape == (0, 3)
    assert ((prox_2of4(z, 1e4) != 0).view(4, 4, 5).sum(1) <= 2).all()
    assert (regulariser(prox_2of4(z, 1e4)) == 0).all()
    with pytest.raises(ValueError, match="lam"):
        prox_2of4(z, -1.0)
    with pytest.raises(ValueError, match="multiple of 4"):
        prox_2of4(torch.ones(6, 2), 1.0)


class Toy(torch.nn.Module):
    """Predicts the next token from the last through one linear layer that sees half of its inputs always 0."""

    def __init__(self, dtype=torch.float32, inputs=16):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = torch.nn.Embedding(8, inputs)
        self.body = torch.nn.Linear(inputs, 8, bias=False)
        self.head = torch.nn.Linear(8, 8, bias=False)
        features = torch.randn(8, inputs, generator=generator)
        features[:, ::2] = 0
        self.embed.weight.data = features
        self.body.weight.data = 0.1 * torch.randn(8, inputs, generator=generator)
        self.body.weight.data[:, ::2] += 0.2  # the larger weights are the useless ones
        self.head.weight.data = 5 * torch.eye(8)
        self.to(dtype)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.head(self.body(self.embed(input_ids))))


def token_batches(count):
    start = torch.randint(8, (count, 1), generator=torch.Generator().manual_seed(1))
    return list((start + torch.arange(24)) % 8)  # each token is followed by the next number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learning_keeps_the_inputs_that_the_loss_needs(dtype):
    model, seen = Toy(dtype), []
    model.body.weight.grad = torch.ones_like(model.body.weight)
    model.embed.weight.requires_grad_(False)
    model.train()
    model.head.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    masks = get_selector("proxsparse").learn(
        model, token_batches(60), lam=0.05, lr=1e-2, progress=lambda *args: seen.append(args)
    )
    assert list(masks) == ["body"]
    mask = masks["body"]
    assert mask.shape == (16, 8) and mask.dtype == torch.bool
    assert (mask.view(4, 4, 8).sum(1) == 2).all()
    useful = torch.arange(16) % 2 == 1
    layer = LayerData("body", model.body.weight.detach().T)
    magnitude = get_selector("magnitude").select(layer, Pattern.parse("2:4"))
    assert mask[useful].sum() > 1.5 * magnitude.mask_NK[useful].sum()
    assert [step for step, _, _ in seen] == list(range(1, 61)) and seen[-1][2] < seen[0][2]
    # The model is as it was.
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training and not model.head.training
    assert model.body.weight.requires_grad and not model.embed.weight.requires_grad
    assert torch.equal(model.body.weight.grad, torch.ones_like(model.body.weight)) and model.head.weight.grad is None


def test_learning_is_reproducible_and_restores_after_an_error():
    model, batches = Toy(), token_batches(10)
    assert torch.equal(learn_masks(model, batches)["body"], learn_masks(model, batches, epochs=1)["body"])
    for name, value in (("epochs", 0), ("warmup", 2.0), ("warmup", -0.1)):
        with pytest.raises(ValueError, match=f"mask 'proxsparse': {name} must be"):
            learn_masks(model, batches, **{name: value})
    weights = model.body.weight.detach().clone()
    for progress, lr, error in ((lambda *args: 1 / 0, 1e-2, ZeroDivisionError), (None, float("nan"), ValueError)):
        with pytest.raises(error):
            learn_masks(model, batches, lr=lr, progress=progress)
        assert torch.equal(model.body.weight, weights) and model.body.weight.requires_grad


def test_bad_calls():
    with pytest.raises(ValueError, match="batches is empty"):
        learn_masks(Toy(), [])
    with pytest.raises(ValueError, match=r"2:4.*body.*18"):
        learn_masks(Toy(inputs=18), token_batches(2))
    with pytest.raises(ValueError, match="mask 'proxsparse' has no option 'colour'.*lam, lr, epochs, warmup"):
        learn_masks(Toy(), token_batches(2), colour="red")


def test_a_real_architecture_with_a_tied_head():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=32, num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, **sizes
    )
    model = transformers.LlamaForCausalLM(config)
    batches = [torch.randint(32, (2, 12)) for _ in range(3)]
    masks = learn_masks(model, batches)
    assert len(masks) == 14 and not any("head" in name for name in masks)
    for name, mask in masks.items():
        assert mask.shape == model.get_submodule(name).weight.T.shape
        assert (mask.reshape(-1, 4, mask.shape[1]).sum(1) == 2).all()


def test_conv1d_is_stored_inputs_by_outputs():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    masks = learn_masks(model, [torch.randint(32, (1, 8))])
    assert masks["transformer.h.0.attn.c_attn"].shape == (16, 48)
    assert np.all(masks["transformer.h.0.mlp.c_proj"].reshape(16, 4, 16).sum(1).numpy() == 2)
