"""Bytes on disk of a model stored in each way: what quantize and adapter_rank write, 50 % sparse. One row a variant.

    python benchmarks/models/sizes.py --model FOLDER [--group 64] [--rank 64] [--out FOLDER]

Sizes depend on shapes alone, so that one short window, no solve and nearest rounding are enough; every folder is read back by
transformers, with nothing missing. Rows go to benchmarks/results/sizes_<model>.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.models.quality import NAMES
from benchmarks.rows import Results
from qprecon.llm import prune_model
from qprecon.llm.model.loading import load_config


def variants(group: int, rank: int) -> dict[str, dict[str, Any]]:
    int4 = {"quantize": "int4", "group_size": group}
    return {
        "bf16": {}, f"bf16 + rank {rank}": {"adapter_rank": rank}, "int8": {"quantize": "int8"}, "fp8": {"quantize": "fp8"},
        f"int4, groups of {group}": int4, f"int4, groups of {group} + rank {rank}": {**int4, "adapter_rank": rank},
        f"int3, groups of {group}": {"quantize": "int3", "group_size": group}, "nvfp4": {"quantize": "nvfp4"},
        "mxfp4": {"quantize": "mxfp4"},
    }  # fmt: skip


def measure(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    windows = torch.arange(16)[None]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        how = {"update": "none", "rounding": "nearest", "dtype": "bfloat16", "progress": False}
        report = prune_model(model, windows, out=out, **how, **settings)
        _, about = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
        assert not about["missing_keys"] and not about["unexpected_keys"], about
        size = {part: sum(path.stat().st_size for path in (out / part).glob("*.safetensors")) for part in (".", "adapter")}
    weights = sum(row.n_inputs * row.n_outputs for row in report.layers)
    return {"model_bytes": size["."], "adapter_bytes": size["adapter"], "pruned_weights": weights, "parameters": report.parameters}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a model folder")
    parser.add_argument("--group", type=int, default=64, help="inputs that share a scale in int4 and int3 (64)")
    parser.add_argument("--rank", type=int, default=64, help="of the adapters (64)")
    parser.add_argument("--name", help="the model's name in the results")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results", help="folder of the JSON")
    parsed = parser.parse_args(arguments)
    config = load_config(parsed.model).get_text_config()
    name = parsed.name or NAMES.get((config.model_type, config.hidden_size)) or Path(parsed.model).resolve().name
    results = Results(parsed.out / f"sizes_{name}.json")
    for variant, settings in variants(parsed.group, parsed.rank).items():
        identity = {"model": name, "variant": variant}
        if results.get(identity) is None:
            results.add(identity | measure(parsed.model, settings), identity)
        row = results.get(identity)
        print(f"{variant:32} {row['model_bytes'] / 1e6:8.1f} MB + {row['adapter_bytes'] / 1e6:6.1f} MB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
