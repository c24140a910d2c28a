"""Two processes on GPUs: each on a card of its own through NCCL, or both on one through Gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ROOT = Path(__file__).parents[3]


def scaled(tmp_path, *arguments):
    """The runs of benchmarks/ranks/scaling.py on one rank and on two, and how the outputs differ."""
    command = [sys.executable, "benchmarks/ranks/scaling.py", "--model", "tiny", "--samples", "32", "--seqlen", "256"]
    command += ["--workdir", str(tmp_path), "--out-json", str(tmp_path / "out.json"), "--limit", "100", *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    (result,) = json.loads((tmp_path / "out.json").read_text())
    return result["runs"], result["runs"][1]["against_first"]


@pytest.mark.parametrize("own", [False, True])
def test_two_ranks_agree_with_one(own, tmp_path):
    if own and torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    runs, differences = scaled(tmp_path, *([] if own else ["--device", "cuda:0"]))
    assert differences["differing_mask_share"] < 1e-2 and differences["relative_difference"] < 5e-2
    assert runs[1]["error_stored"] == pytest.approx(runs[0]["error_stored"], rel=1e-2)
    assert runs[1]["largest_gap"] <= 1e-4 * 1.01
    assert len({facts["device"] for facts in runs[1]["by_rank"]}) == 1 + own


def test_a_fixed_order_gives_the_same_bits(tmp_path):
    _, differences = scaled(tmp_path, "--device", "cuda:0", "--setting", "fixed_order=true", "--setting", "preset=balanced")
    assert differences["identical_tensors"] == differences["tensors"]


@pytest.mark.parametrize("state", ["float32", "host"])
def test_two_cards_recover_alike(state, tmp_path):
    """Through FSDP2 and NCCL, in bfloat16 with float32 masters."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only, and Gloo's collectives crash on it")
    command = [sys.executable, "benchmarks/ranks/recover_ranks.py", "--model", "tiny", "--windows", "16", "--seqlen", "128"]
    command += ["--passes", "2", "--limit", "100", "--workdir", str(tmp_path), "--out-json", str(tmp_path / "out.json")]
    command += ["--optimizer-state", state]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    one, two = json.loads((tmp_path / "out.json").read_text())[0]["runs"]
    assert two["losses"] == pytest.approx(one["losses"], rel=2e-2) and two["losses"][-1] < two["losses"][0]
    assert two["against_first"]["differing_mask_share"] < 1e-4  # kept weights may round to zero
    assert two["against_first"]["relative_difference"] < 1e-2
    assert len({facts["device"] for facts in two["by_rank"]}) == 2
