"""What Gram products of bfloat16 rows lose on a GPU's tensor cores, and what they take, by the rows that one product sums.

    python benchmarks/layers/gram_rows.py [--out FILE]

Rows of one kind with and without a mean, rows of which the first of every 2048 is large in some inputs, of which the first of every
8192 is large, and of which the very first is huge in some inputs. They are summed in the order of the text, and by
`qprecon.data.sums` (`rows` is null). `off` is the largest error of an entry (i, j) in units of 2⁻²⁴ √(H_ii H_jj), `rest` what is
left of it after a factor that all entries share (docs/mathematics.md). Sums of the products are rounded.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the package of this checkout

from qprecon.data import sums

RESULT = Path(__file__).parents[1] / "results" / "gram_rows.json"
TOKENS, ROWS, INPUTS = 16384, (512, 1024, 2048, 4096, 8192), (64, 576, 1024, 4096, 14336)
KINDS = ("mean", "no mean", "massive tokens", "first token", "massive first token")
SOME = 32  # inputs whose entries are compared


def data(kind: str, n: int) -> torch.Tensor:
    """(TOKENS, n) bfloat16."""
    x_TN = torch.randn(TOKENS, n, device="cuda") + (0.5 if kind != "no mean" else 0.0)
    if kind == "massive tokens":
        x_TN[::2048] += 300.0 * (torch.arange(n, device="cuda") % 8 == 0)
    if kind == "first token":
        x_TN[::8192] *= 40.0
    if kind == "massive first token":
        x_TN[0, ::8] *= 1000.0
    return x_TN.bfloat16()


def summed(x_TN: torch.Tensor, rows: int | None) -> torch.Tensor:
    """XᵀX, float32, from products of so many rows; None: as qprecon makes it, lower triangle included."""
    sum_NN = torch.zeros(x_TN.shape[1], x_TN.shape[1], device="cuda")
    if rows is None:
        for part_TN in x_TN.split(sums.MANY_ROWS):
            sums.add_gram(sum_NN, part_TN)
        sums.mirror(sum_NN)
        return sum_NN
    for part_TN in x_TN.split(rows):
        torch.addmm(sum_NN, part_TN.t(), part_TN, out_dtype=torch.float32, out=sum_NN)
    return sum_NN


def seconds(x_TN: torch.Tensor, rows: int | None) -> float:
    """The least of three, after one to warm up."""
    found = []
    for _ in range(4):
        torch.cuda.synchronize()
        started = time.perf_counter()
        summed(x_TN, rows)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return min(found[1:])


def measure(kind: str, n: int) -> list[dict[str, Any]]:
    """A row for each number of rows."""
    x_TN = data(kind, n)
    some = torch.randperm(n, device="cuda")[:SOME]
    exact_SN = x_TN[:, some].double().T @ x_TN.double()
    root_N = sum(part_TN.double().square().sum(0) for part_TN in x_TN.split(4096)).sqrt()
    scale_SN = root_N[some][:, None] * root_N
    found = []
    for rows in (*ROWS, None):
        error_SN, one_SN = (summed(x_TN, rows)[some].double() - exact_SN) / scale_SN, exact_SN / scale_SN
        factor = (error_SN * one_SN).sum() / one_SN.square().sum()
        off, beyond = (float(each_SN.abs().max()) * 2**24 for each_SN in (error_SN, error_SN - factor * one_SN))
        ms = 1e3 * seconds(x_TN, rows) * 8192 / TOKENS
        found.append({"n": n, "kind": kind, "rows": rows, "ms": ms, "off": off, "theta": float(factor) * 2**24, "rest": beyond})
    line = "; ".join(f"{row['rows']}: {row['ms']:.2f} ms, off {row['off']:.0f}, rest {row['rest']:.0f}" for row in found)
    print(f"{n} inputs, {kind}: {line}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("not measured: this needs an NVIDIA GPU", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    rows = [row for n in INPUTS for kind in KINDS[: 1 if n > 8192 else None] for row in measure(kind, n)]
    about = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    arguments.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
