"""How fast the 2:4 layers of pruned models run through torch's semi-structured sparse kernels, beside dense ones.

    python benchmarks/models/end_to_end.py --model llama-3.1-8b --blocks 1 --pattern 2:4 --keep --workdir /tmp/m --out-json run.json
    python benchmarks/layers/sparse.py /tmp/m/llama-3.1-8b-1-pruned ...
    python benchmarks/layers/sparse.py --shapes --dtypes bfloat16 int8 fp8     (random 2:4 weights of an 8B model's shapes)

Every 2:4 layer is run and compared with the dense product; one of each shape is timed. Needs an NVIDIA GPU (Ampere or later; fp8:
Ada or later). A dtype without kernels is named and left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import qprecon
from qprecon.grids.formats import find_grid
from qprecon.grids.scales import fit_scales
from qprecon.llm.evaluation.sparse_check import SparseCheck, check_sparse, measure
from qprecon.llm.evaluation.sparse_products import LOW_BITS, products, why_none

RESULTS = Path(__file__).parents[1] / "results" / "sparse_gpu.json"


LLAMA_8B = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))  # outputs, inputs


def random_check(tokens: int, dtype: str) -> SparseCheck:
    """Random 2:4 weights of LLaMA-3.1-8B's shapes; for int8 and fp8 on their grid, with one scale an output."""
    device, rows = torch.device("cuda"), []
    for outputs, inputs in LLAMA_8B:
        generator = torch.Generator(device).manual_seed(0)
        weight_KN = torch.randn(outputs, inputs, device=device, generator=generator)
        kept = torch.rand(outputs, inputs // 4, 4, device=device, generator=generator).argsort(-1).view(outputs, inputs) < 2
        weight_KN *= kept
        scale_K1 = None
        if dtype in LOW_BITS:
            fitted = fit_scales(find_grid(dtype), weight_KN.T)
            weight_KN, scale_K1 = fitted.nearest(weight_KN.T).T.contiguous(), fitted.scale_GK.T
        rows.append(measure([(weight_KN, scale_K1)], tokens, device, products(dtype)))
    return SparseCheck(tuple(rows), (), tokens, torch.cuda.get_device_name(), dtype)


def rows_of(name: str, check: SparseCheck) -> list[dict]:
    """One row a shape."""
    about = {
        "model": name, "gpu": check.device, "dtype": check.dtype, "tokens": check.tokens, "others": len(check.not_2_4),
        "date": datetime.date.today().isoformat(),
        "versions": {"qprecon": qprecon.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }  # fmt: skip
    return [{**about, **dataclasses.asdict(row)} for row in check.rows]


def main() -> int:
    """Check each folder; 1 where a layer did not run or ran wrongly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", help="models pruned to 2:4")
    parser.add_argument("--shapes", action="store_true", help="random weights of an 8B model's shapes instead")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 16384], help="tokens a product")
    parser.add_argument("--dtypes", nargs="+", default=["float16"], choices=("float16", "bfloat16", "int8", "fp8"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not args.folders and not args.shapes:
        parser.error("give folders, or --shapes")
    rows, good = [], True
    for dtype in args.dtypes:
        if why := why_none(dtype, torch.device("cuda")):
            print(f"{dtype}: not measured: {why}", flush=True)
            good = False
            continue
        for tokens in args.tokens:
            checks = {folder.name: check_sparse(folder, tokens=tokens, dtype=dtype) for folder in args.folders}
            if args.shapes:
                checks["llama-3.1-8b shapes"] = random_check(tokens, dtype)
            for name, check in checks.items():
                print(f"{name}: {check}", flush=True)
                rows += rows_of(name, check)
                good &= check.ok
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
