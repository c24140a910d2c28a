"""A layer with fewer calibration tokens than inputs: pcg with and without being told how many samples H is made of.

    OMP_NUM_THREADS=1 python benchmarks/layers/few_tokens.py --model FOLDER --text FILE [--tokens 1024,256] [--columns 96]

The inputs are those of the layer in the dense model, the first tokens of the text in windows of 256; Wanda mask, 50 %, 1 % damping,
certified to 1e-4. Iterations do not depend on the machine; seconds, with all set-up, are those of the processor, medians of three
taken in turns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import statistics
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import qprecon
from benchmarks.machine import processor
from qprecon.llm.calibration.texts import load_texts
from qprecon.llm.calibration.windows import cut_windows
from qprecon.llm.model.loading import load_causal_lm

RESULTS = pathlib.Path(__file__).parents[1] / "results" / "few_tokens.json"
WINDOW = 256


@torch.no_grad()
def layer_inputs(model: torch.nn.Module, tokenizer, text: str, name: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What enters a linear layer, (T, N), and its weights, (N, K)."""
    seen: list[torch.Tensor] = []
    module = model.get_submodule(name)
    handle = module.register_forward_hook(lambda _, args, output: seen.append(args[0].reshape(-1, args[0].shape[-1])))
    windows = cut_windows(load_texts(text), tokenizer=tokenizer, seqlen=WINDOW).tokens[: -(-tokens // WINDOW)]
    for window in windows:
        model(window[None], use_cache=False)
    handle.remove()
    return torch.cat(seen)[:tokens].float(), module.weight.T.float().contiguous()


def measure(x_TN: torch.Tensor, w_NK: torch.Tensor, repeats: int) -> list[dict]:
    hessian_NN = x_TN.T @ x_TN
    score_NK = w_NK.abs() * hessian_NN.diagonal().sqrt()[:, None]
    mask_NK = score_NK > score_NK.kthvalue(len(w_NK) // 2, 0).values
    seconds: dict[bool, list[float]] = {False: [], True: []}
    rows = {}
    for _ in range(repeats):
        for told in seconds:
            began = time.process_time()
            prepared = qprecon.prepare(hessian_NN, damping=0.01, samples=len(x_TN) if told else None)
            solution = prepared.solve(w_NK, mask_NK, "pcg", tol=1e-4)
            seconds[told].append(time.process_time() - began)
            rows[told] = {
                "n": len(w_NK), "tokens": len(x_TN), "columns": w_NK.shape[1], "samples_told": told,
                "preconditioner": solution.provenance.automatic["preconditioner"], "iterations": int(max(solution.iterations)),
                "relative_gap": float(max(solution.relative_gap)), "certified": bool((solution.relative_gap <= 1e-4).all()),
            }  # fmt: skip
    return [{**row, "seconds": statistics.median(seconds[told])} for told, row in rows.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", default="qwen2.5-coder-0.5b", help="the model's name in the results")
    parser.add_argument("--text", required=True)
    parser.add_argument("--layer", default="model.layers.1.mlp.down_proj")
    parser.add_argument("--tokens", default="1024,256")
    parser.add_argument("--columns", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.tokens.split(",")]
    model, tokenizer = load_causal_lm(arguments.model, device="cpu", dtype="float32")
    x_TN, w_NK = layer_inputs(model, tokenizer, arguments.text, arguments.layer, max(counts))
    rows = []
    for count in counts:
        for row in measure(x_TN[:count], w_NK[:, : arguments.columns].contiguous(), arguments.repeats):
            rows.append({
                "model": arguments.name, "layer": arguments.layer, **row, "device": processor(), "threads": torch.get_num_threads(),
                "load_average": os.getloadavg()[0], "date": datetime.date.today().isoformat(),
                "versions": {"torch": torch.__version__, "qprecon": qprecon.__version__},
            })  # fmt: skip
            print({key: rows[-1][key] for key in ("tokens", "samples_told", "iterations", "relative_gap", "seconds")}, flush=True)
    arguments.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
