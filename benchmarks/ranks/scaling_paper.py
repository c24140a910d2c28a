"""What a run takes on paper, by shape and number of ranks: flops, bytes, seconds and memory of a block and of the whole model.

    python benchmarks/ranks/scaling_paper.py            (rewrites benchmarks/results/scaling_paper.json)

Flops and bytes are counted. Seconds scale each phase of a measured run on one H100 (llama-3.1-8b in results/end_to_end.json)
by the flops of its kind; what a group of layers costs is estimated as the dealing of columns does (qprecon/llm/ranks/dealing.py),
scaled to the same run. Nothing here was measured beyond that run.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from qprecon.llm.ranks.dealing import dealt, seconds_of_column, seconds_once

ROOT = Path(__file__).resolve().parents[2]
WINDOWS, SEQLEN = 128, 2048
TOKENS = WINDOWS * SEQLEN
BUS = 329e9  # bytes a second: bus bandwidth of an all-reduce of 1 GiB between two H100s of one host through NCCL, as measured there
READ = 2e9  # bytes a second from the disk, assumed
MEASURED, MEASURED_ROW = "llama-3.1-8b", "end_to_end.json"


@dataclass(frozen=True)
class Shape:
    """A decoder. kv: outputs of k and of v. experts: how many, and how many of them a token goes through; (1, 1) if dense."""

    hidden: int
    inner: int
    blocks: int
    kv: int
    vocabulary: int
    experts: tuple[int, int] = (1, 1)

    @property
    def groups(self) -> list[tuple[int, int, float]]:
        """Layers of a block that share a Gram matrix: inputs, outputs, and the share of tokens that reach them."""
        n, used = self.experts
        attention = [(self.hidden, self.hidden + 2 * self.kv, 1.0), (self.hidden, self.hidden, 1.0)]
        expert = [(self.hidden, 2 * self.inner, used / n), (self.inner, self.hidden, used / n)]
        return attention + n * expert

    @property
    def block_parameters(self) -> int:
        return sum(n * k for n, k, _ in self.groups)

    @property
    def outside_parameters(self) -> int:
        """Embeddings and head."""
        return 2 * self.vocabulary * self.hidden


SHAPES = {
    "llama-3.1-8b": Shape(4096, 14336, 32, 1024, 128256),
    "llama-3.1-70b": Shape(8192, 28672, 80, 1024, 128256),
    "llama-3.1-405b": Shape(16384, 53248, 126, 1024, 128256),
    "mixtral-8x22b": Shape(6144, 16384, 56, 1024, 32768, (8, 2)),
    "qwen3-235b": Shape(4096, 1536, 94, 512, 151936, (128, 8)),
    "deepseek-v3": Shape(7168, 2048, 61, 1024, 129280, (256, 8)),  # with a plain attention, and without the shared expert
}


def block(shape: Shape, ranks: int) -> dict[str, float]:
    """Of one block: flops of a rank by kind, bytes that each rank hands to collectives, and its share of the matrices."""
    active = sum(n * k * share for n, k, share in shape.groups)
    attention = 2 * SEQLEN * shape.hidden  # a token's scores and sums, half of them masked
    lumps = tuple((n, (max(8, k // 64),) * (k // max(8, k // 64))) for n, k, _ in shape.groups)
    busy, matrices = [0.0] * ranks, [0.0] * ranks
    for piece in dealt(lumps, ranks):
        n, widths = lumps[piece.group]
        busy[piece.rank] += seconds_once(n) + sum(widths[piece.first : piece.last]) * seconds_of_column(n)
        matrices[piece.rank] += n**2
    everything = sum(seconds_once(n) + k * seconds_of_column(n) for n, k, _ in shape.groups)
    return {
        "forward_flops": 2 * 2 * TOKENS * (active + attention) / ranks,  # two passes: Gram matrices, then on to the next block
        "gram_flops": sum(TOKENS * share * n**2 for n, _, share in shape.groups) / ranks,  # one triangle
        "column_product_flops": 2 * sum(n**2 * k for n, k, _ in shape.groups) / ranks,  # of one product with H
        "solve_seconds_unscaled": max(busy), "solve_efficiency": everything / (ranks * max(busy)),
        "bytes_reduced": 4 * sum(n**2 for n, _, _ in shape.groups) if ranks > 1 else 0,
        "bytes_broadcast": 2 * shape.block_parameters if ranks > 1 else 0,
    }  # fmt: skip


def memory(shape: Shape, ranks: int) -> dict[str, float]:
    """Bytes on a card at most, and of the host; bfloat16 weights, float32 Gram matrices, the largest layer's float64 factor.

    The factor of the certificate (8 N²), made in the place of its matrix, and the solver's set-up (6 N²) lie beside a chunk of 2²⁵
    weights with 80 bytes each, half of that where ranks share a block, and the float32 weights of the layers that share the matrix:
    as they are, as they are asked for, and solved.
    """
    largest = max(n for n, _, _ in shape.groups)
    at_work = max(14 * n**2 + 80 * min(n * k, 2**25 if ranks == 1 else 2**24) + 12 * n * k for n, k, _ in shape.groups)
    held = {
        "activations": 2 * TOKENS * shape.hidden / ranks,
        "block, and the one after": 2 * 2 * shape.block_parameters,
        "Gram matrices": 4 * sum(n**2 for n, _, _ in shape.groups),
        "factors, a chunk of columns and its layers": at_work,
    }
    model = 2 * (shape.blocks * shape.block_parameters + shape.outside_parameters)
    sizes = {"block": 2 * shape.block_parameters, "widest": largest, "matrix": 4 * largest**2, "factor": 8 * largest**2}
    sizes["matrices"] = held["Gram matrices"]
    return held | sizes | {"card": sum(held.values()), "host": 3 * 2 * shape.block_parameters * ranks + model, "disk": 2 * model}


def estimated(shape: Shape, ranks: int) -> dict[str, float]:
    """Seconds of a whole run with `fast`."""
    rows = json.loads((ROOT / "benchmarks" / "results" / MEASURED_ROW).read_text())
    known = next(row for row in rows if row["model"].startswith(MEASURED) and row["update"] == "optimal")["seconds"]
    base, one, mine = SHAPES[MEASURED], block(SHAPES[MEASURED], 1), block(shape, ranks)
    columns = sum(known[name] for name in ("mask", "solve", "audit", "update", "measure"))
    ratio = lambda name: shape.blocks * mine[name] / (base.blocks * one[name])  # noqa: E731
    wire = 2 * (ranks - 1) / ranks * mine["bytes_reduced"] + mine["bytes_broadcast"]
    seconds = {
        "forward": known["forward"] * ratio("forward_flops"), "gram": known["gram"] * ratio("gram_flops"),
        "columns": columns * ratio("solve_seconds_unscaled"), "exchange": shape.blocks * wire / BUS,
        "load, capture": known["load"] + known["capture"] * shape.hidden / base.hidden,
    }  # fmt: skip
    model = 2 * (shape.blocks * shape.block_parameters + shape.outside_parameters)
    return seconds | {"all": sum(seconds.values()), "reading the model once": model / READ}


def main() -> None:
    """Write the JSON."""
    found: list[dict[str, Any]] = []
    for name, shape in SHAPES.items():
        for ranks in (1, 2, 4, 8):
            costs = {"block": block(shape, ranks), "memory": memory(shape, ranks), "seconds": estimated(shape, ranks)}
            found.append({"model": name, "ranks": ranks, "windows": WINDOWS, "seqlen": SEQLEN, **costs})
    (ROOT / "benchmarks" / "results" / "scaling_paper.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
