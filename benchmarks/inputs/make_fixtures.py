"""Make the small real problems that the tests use: Gram matrices and weights of a few layers of a language model.

    python benchmarks/inputs/make_fixtures.py MODEL TEXT --prefix smollm2 --layer model.layers.0.self_attn.o_proj [--layer ...]
    python benchmarks/inputs/make_fixtures.py MODEL TEXT --prefix smollm2 --layer ... --whole --out FOLDER   for benchmarks

MODEL is a transformers folder, TEXT a plain or gzipped text file. A layer's file holds the upper triangle of H = XᵀX (float32,
row by row, accumulated in float64 over the tokens of all windows), ``columns`` evenly spaced columns of W (inputs by outputs) and
what it was made from; with --whole all of H and W, uncompressed, as problems.py reads them.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import pathlib
from collections.abc import Callable

import numpy as np
import torch
import transformers


def read_windows(tokenizer: transformers.PreTrainedTokenizerBase, path: pathlib.Path, windows: int, length: int) -> torch.Tensor:
    """The first ``windows`` windows of ``length`` tokens, (windows, length), without special tokens."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    ids = tokenizer(text[: windows * length * 8], add_special_tokens=False)["input_ids"]
    if len(ids) < windows * length:
        raise SystemExit(f"{path} gives {len(ids)} tokens, {windows * length} are needed")
    return torch.tensor(ids[: windows * length]).reshape(windows, length)


def accumulate(model: torch.nn.Module, layers: list[str], windows_BT: torch.Tensor) -> dict[str, np.ndarray]:
    """H of each named layer, (N, N) float64, one window after the other."""
    grams: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def add(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x_TN = args[0].reshape(-1, args[0].shape[-1]).double()
            grams[name] = grams.get(name, 0) + x_TN.T @ x_TN

        return add

    modules = dict(model.named_modules())
    handles = [modules[name].register_forward_pre_hook(hook(name)) for name in layers]
    with torch.no_grad():
        for index, window_T in enumerate(windows_BT.to(model.device)):
            model.model(input_ids=window_T[None], use_cache=False)  # the decoder only: logits are not needed
            print(f"\rwindow {index + 1} of {len(windows_BT)}", end="", flush=True)
    print()
    for handle in handles:
        handle.remove()
    return {name: gram.cpu().numpy() for name, gram in grams.items()}


def main() -> None:
    """Write one npz a layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--layer", action="append", required=True, help="a linear layer's name in model.named_modules(); repeat")
    parser.add_argument("--prefix", required=True, help="start of the file names")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parents[2] / "tests" / "fixtures" / "real")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--columns", type=int, default=24)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--whole", action="store_true", help="all of H and W, for benchmarks")
    args = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval().to(args.device)
    grams = accumulate(model, args.layer, read_windows(tokenizer, args.text, args.windows, args.length))
    args.out.mkdir(parents=True, exist_ok=True)
    for name, h_NN in grams.items():
        w_NK = model.get_submodule(name).weight.detach().T.cpu().numpy()
        short = name.removeprefix("model.layers.").replace("self_attn.", "").replace("mlp.", "").replace(".", "_")
        path = args.out / f"{args.prefix}_{short}.npz"
        if args.whole:
            np.savez(path, H=h_NN.astype(np.float32), W=np.ascontiguousarray(w_NK, dtype=np.float32))
            print(f"{path}: {w_NK.shape}")
            continue
        chosen_K = np.linspace(0, w_NK.shape[1] - 1, args.columns).round().astype(int)
        about = {
            "layer": name,
            "tokens": args.windows * args.length,
            "windows": [args.windows, args.length],
            "columns": chosen_K.tolist(),
            "text_sha256": hashlib.sha256(args.text.read_bytes()).hexdigest(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        np.savez_compressed(
            path,
            hessian_upper=h_NN[np.triu_indices(len(h_NN))].astype(np.float32),
            weights_NK=np.ascontiguousarray(w_NK[:, chosen_K], dtype=np.float32),
            about=json.dumps(about),
        )
        eigenvalues = np.linalg.eigvalsh(np.float64(np.float32(h_NN)))
        size = path.stat().st_size / 1e6
        print(f"{path}: N {len(h_NN)}, eigenvalues {eigenvalues[0]:.3g} to {eigenvalues[-1]:.3g}, {size:.2f} MB")


if __name__ == "__main__":
    main()
