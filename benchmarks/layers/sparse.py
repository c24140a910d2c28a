"""How fast the 2:4 layers of pruned models run through torch's semi-structured sparse kernels, beside dense ones.

    python benchmarks/models/end_to_end.py --model llama-3.1-8b --blocks 1 --pattern 2:4 --keep --workdir /tmp/m --out-json run.json
    python benchmarks/layers/sparse.py /tmp/m/llama-3.1-8b-1-pruned ...

Every 2:4 layer is run and compared with the dense product; one of each shape is timed. Needs an NVIDIA GPU (Ampere or later).
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
from qprecon.llm.evaluation.sparse_check import SparseCheck, check_sparse

RESULTS = Path(__file__).parents[1] / "results" / "sparse_gpu.json"


def rows_of(folder: Path, check: SparseCheck) -> list[dict]:
    """One row a shape."""
    about = {
        "model": folder.name, "gpu": check.device, "dtype": check.dtype, "tokens": check.tokens, "others": len(check.not_2_4),
        "date": datetime.date.today().isoformat(),
        "versions": {"qprecon": qprecon.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }  # fmt: skip
    return [{**about, **dataclasses.asdict(row)} for row in check.rows]


def main() -> int:
    """Check each folder; 1 where a layer did not run or ran wrongly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="models pruned to 2:4")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 16384], help="tokens a product")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows, good = [], True
    for folder in args.folders:
        for tokens in args.tokens:
            check = check_sparse(folder, tokens=tokens, dtype=args.dtype)
            print(f"{folder.name}: {check}", flush=True)
            rows += rows_of(folder, check)
            good &= check.ok
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
