"""Low-bit weights in compressed-tensors files: transformers loads them, and reads the weights that were made, bit for bit."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from qprecon.grids.formats import find_grid
from qprecon.grids.scales import fit_scales
from qprecon.llm.lowbit.compressed import configuration, packed

pytest.importorskip("compressed_tensors")

DTYPES = ("bfloat16", "float16", "float32")
GRIDS = (("int8", None), ("int4", 16), ("int3", 32), ("int2", 16), ("fp8", None), ("nvfp4", "default"), ("mxfp4", "default"))


def toy(dtype):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return LlamaForCausalLM(config).to(getattr(torch, dtype))


def sparse_weights(weight):
    """Half of the weights, (inputs, outputs), float32."""
    mask = torch.rand(weight.T.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    return weight.T.float() * mask, mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "group"), GRIDS)
def test_transformers_reads_what_was_made(name, group, dtype, tmp_path):
    """No missing or unexpected keys; the loaded weights are those on the grid, the zeros those of the mask."""
    if name in ("nvfp4", "mxfp4") and dtype != "bfloat16":
        pytest.skip("read as bfloat16 only")
    if name == "nvfp4" and transformers.__version__.startswith("4."):
        pytest.skip("transformers 4 makes another shape of its scale")
    model, grid = toy(dtype), find_grid(name, group_size=group, scale_dtype=dtype)
    linears = [key for key, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    chosen = [key for key in linears if "layers" in key]
    state, want = dict(model.state_dict()), {}
    for key in chosen:
        weights_NK, mask_NK = sparse_weights(state.pop(f"{key}.weight"))
        fitted = fit_scales(grid, weights_NK)
        want[key] = fitted.nearest(weights_NK)
        assert (want[key][~mask_NK] == 0).all()
        state |= {f"{key}.{part}": tensor for part, tensor in packed(fitted, want[key]).items()}
    model.save_pretrained(tmp_path)
    save_file({key: tensor.clone() for key, tensor in state.items()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((tmp_path / "config.json").read_text())
    written["quantization_config"] = configuration(grid, chosen, linears)
    (tmp_path / "config.json").write_text(json.dumps(written))

    loaded, about = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits = loaded(torch.arange(7)[None]).logits  # the first forward unpacks
    modules = dict(loaded.named_modules())
    for key in chosen:
        assert torch.equal(modules[key].weight.float().T, want[key].to(getattr(torch, dtype)).float())
    assert logits.isfinite().all()


def test_what_the_library_would_read_otherwise_is_not_written():
    """Weights that are off the grid are noticed."""
    weights_NK, _ = sparse_weights(torch.randn(32, 64))
    fitted = fit_scales(find_grid("int4", group_size=32), weights_NK)
    with pytest.raises(AssertionError, match="int4"):
        packed(fitted, fitted.nearest(weights_NK) + 0.01)
