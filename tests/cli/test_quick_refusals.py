"""A wrong word is told before the libraries are imported, which takes seconds: torch, transformers and all that they bring."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ["torch", "transformers", "jax", "scipy", "datasets", "lm_eval", "safetensors", "pyarrow", "pandas", "osqp", "cvxpy"]
TELL = """
import contextlib, io, json, sys
from qprecon import cli
found = []
for line in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            code = cli.main(line)
        except SystemExit as stop:
            code = stop.code
    found.append([code, said.getvalue(), [name for name in json.loads(sys.argv[2]) if name in sys.modules]])
print(json.dumps(found))
"""
REFUSED = {
    "prune M O --mask Wanda": "did you mean 'wanda'?",
    "prune M O --mask proxsparse --sparsity 0.5": "makes 2:4 only",
    "prune M O --mask wanda --update own": "no weight update of its own",
    "prune M O --preset fats": "did you mean fast?",
    "prune M O --sparsity 50": "write '50%'",
    "prune M O --pattern 5:4": "would keep 5 of 4",
    "prune M O --backend PCG": "did you mean 'pcg'?",
    "prune M O --tol 0": "tol must",
    "prune M O --targets re:[": "targets: 're:[' is not a regular expression",
    "prune M O --ignore re:(": "ignore: 're:(' is not a regular expression",
    "prune M O --dtype bfloat": "dtype 'bfloat' cannot be used; use one of float16, bfloat16, float32, float64",
    "prune M O --mask-option grup=layer": "mask 'wanda' has no option 'grup'; did you mean 'group'?",
    "prune M O --mask magnitude --mask-option group=row": "mask 'magnitude': group must be one of output, layer, input",
    "prune M O --mask sparsegpt --mask-option blocksize=64": "did you mean 'block_size'?",
    "prune M O --mask sparsegpt --mask-option block_size=0": "mask 'sparsegpt': block_size must be a positive integer",
    "prune M O --mask alps --mask-option rho=-1": "mask 'alps': rho must be positive",
    "prune M O --mask alps --mask-option rho=Infinity": "mask 'alps': rho must be positive and finite",
    "prune M O --mask thanos --mask-option damping=x": "damping must be a number",
    "prune M O --mask thanos --mask-option outlier_rows=0.1": "mask 'thanos': outlier_rows applies to N:M patterns only",
    "prune M O --mask proxsparse --pattern 2:4 --mask-option epochs=0": "mask 'proxsparse': epochs must be at least 1",
    "prune M O --mask proxsparse --pattern 2:4 --mask-option lr=-1": "mask 'proxsparse': lr must be positive and finite, got -1",
    "prune M O --mask proxsparse --pattern 2:4 --mask-option lr=NaN": "mask 'proxsparse': lr must be positive and finite, got nan",
    "prune M O --mask proxsparse --pattern 2:4 --mask-option lam=-1": "mask 'proxsparse': lam must be finite and not negative",
    "prune M O --mask given": "mask 'given' needs mask_options=",
    "prune M O --mask-file M --mask-option orientation=KM": "mask 'given': orientation must be one of NK, KN",
    "prune M O --refine block --refine-option pases=4": "--refine-option has no option 'pases'",
    "prune M O --refine block --refine-option lr=0": "lr must be a positive number",
    "prune M O --allocation-option lamm=1": "allocation 'loss' has no option 'lamm'",
    "prune M O --allocation loss --allocation-option per=row": "per must be block or layer",
    "prune M O --allocation owl --pattern 2:4": "give a sparsity",
    "prune M O --preset fast --allocation-option lam=1":
        "--allocation-option: lam needs --allocation owl or --allocation loss",
    "prune M O --token-weights inf": "token_weights must be at most 4, got inf",
    "prune M O --token-weights 1e9": "token_weights must be at most 4, got 1000000000.0",
    "prune M O --preset best --output-weights inf": "output_weights must be at most 4, got inf",
    "prune M O --preset best --output-weights 5": "output_weights must be at most 4, got 5.0",
    "prune M O --damping inf": "damping must be a finite number, got inf",
    "prune M O --rank-timeout inf": "rank_timeout must be a finite number, got inf",
    "prune M O --seed 9223372036854775808": "seed must be at most 9223372036854775807, got 9223372036854775808",
    "prune M O --update none --backend PCG": "did you mean 'pcg'?",
    "prune M O --update none --tol 5": "tol must lie between 0 and 1, got 5",
    "prune M O --solve-option lower=-1 --solve-option upper=-2":
        "--solve-option: lower must not be above upper, got lower=-1 and upper=-2",
    "prune M O --solve-option lower=Infinity": "--solve-option: lower is inf, which no weight can satisfy",
    "prune M O --solve-option rho=0.1": "option 'rho' goes with a named backend, not with 'auto', which chooses by the problem",
    "prune M O --solve-option time_limt=3": "unknown option 'time_limt'; did you mean 'time_limit'?",
    "prune M O --backend osqp --solve-option rho=-1": "backend 'osqp' has no option 'rho'. Its options: polishing, workers",
    "prune M O --backend mpax --solve-option foo=1": "backend 'mpax' has no option 'foo'. Its options: paper, batch, jit",
    "prune M O --backend osqp --solve-option workers=0": "backend 'osqp': workers must be a positive integer",
    "prune M O --residual 0.5 --no-order": "residual needs --order: a layer",
    "prune M O --targets re:": "targets: a pattern is a non-empty string",
    "prune M O --rounding-option method=nearest": "rounding 'sweep' has no option 'method'. Its options: sweeps, refits, repeats",
    "prune M O --solve-option batch_size=0": "batch_size must be a positive integer",
    "prune M O --solve-option dtype=float16": "float32",
    "prune M O --solve-option damping=0.1": "give damping=... itself",
    "prune M O --backend pcg --solve-option rnak=8": "did you mean 'rank'?",
    "prune M O --backend pcg --solve-option rank=0": "backend 'pcg': rank must be at least 1",
    "prune M O --quantize int5": "did you mean int8?",
    "prune M O --group-size 64": "group_size is of quantize",
    "prune M O --rounding swep": "did you mean sweep?",
    "prune M O --prune_method wanda": "here that is --mask",
    "prune M O --device cudda": "unknown device 'cudda'",
    "prune M O --store cudda": "unknown store 'cudda'",
    "prune M O --mask-file nowhere": "no such file or folder: nowhere",
    "prune M O --calib nowhere.txt": "no such text file: nowhere.txt",
    "prune M O --calib FOLDER": "is a folder",
    "prune M O --calib builtin:0.5 --calib nowhere.txt:0.5": "no such text file: nowhere.txt",
    "prune M O --calib builtin:0,5": "did you mean builtin:0.5?",
    "prune ./nowhere O": "no such model folder: ./nowhere",
    "prune FOLDER O": "holds no config.json",
    "prune EMPTY O": "holds no weights",
    "prune MUTE O --calib builtin": "has no tokenizer, which the calibration text needs",
    "prune --recipe nowhere.yaml": "no such recipe",
    "recover M OTHER O --train wieghts": "did you mean 'weights'?",
    "recover M OTHER O --dtype bfloat": "dtype 'bfloat' cannot be used",
    "recover M OTHER O --lr -1": "lr must be a positive number",
    "recover M OTHER O --masks nowhere": "no such file or folder: nowhere",
    "recover M OTHER O --device cudda": "unknown device",
    "recover M OTHER O --calib nowhere.txt": "no such text file",
    "recover M ./nowhere O": "no such model folder: ./nowhere",
    "recover M M O": "are the same model",
    "eval M": "nothing to measure",
    "eval M --text builtin --limit 3": "limit has no effect",
    "eval M --text builtin --seqlen -1": "argument --seqlen: it must be at least 2, got -1",
    "eval M --text builtin --device cudda": "unknown device",
    "eval M --text nowhere.txt": "no such text file",
    "eval MUTE --text builtin": "has no tokenizer",
    "eval ./nowhere --text builtin": "no such model folder: ./nowhere",
    "eval M --tasks PIQA": "did you mean 'piqa'?",
    "eval M --tasks piqaa": "did you mean 'piqa'",
    "eval M --tasks piqq --data-dir FOLDER": "did you mean 'piqa'?",
    "eval M --tasks piqa --data-dir nowhere": "no such folder: nowhere",
    "eval M --tasks piqa --data-dir FOLDER": "has none of piqa_valid",
    "eval M --tasks piqa --limit 0": "it must be at least 1, got 0",
    "check-sparse ./nowhere": "no such model folder: ./nowhere",
    "check-sparse FOLDER": "holds no config.json",
    "check-sparse M --tokens 0": "it must be at least 1, got 0",
    "solve nowhere.npz -o o.npz": "no such file: nowhere.npz",
    "solve nowhere.npz -o o.npz --backend PCG": "did you mean 'pcg'?",
    "solve nowhere.npz -o o.npz --tol 0": "it must be above 0, got 0",
    "demo --model nowhere": "nowhere is not a model folder",
    "report nowhere": "nowhere",
}  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Each line's exit code, its words, and which of the libraries were there afterwards."""
    here = tmp_path_factory.mktemp("words")
    names = {name: here / name.lower() for name in ("M", "OTHER", "MUTE", "EMPTY", "FOLDER")}
    for name, folder in names.items():
        folder.mkdir()
        if name != "FOLDER":
            (folder / "config.json").write_text('{"model_type": "llama"}')
        if name in ("M", "OTHER", "MUTE"):
            (folder / "model.safetensors").touch()
        if name in ("M", "OTHER"):
            (folder / "tokenizer.json").touch()
    lines = [[str(names.get(word, word)) for word in line.split()] for line in REFUSED]
    calib = [["--calib", "builtin"] if line[0] in ("prune", "recover") and "--calib" not in line else [] for line in lines]
    given = json.dumps([line + more for line, more in zip(lines, calib, strict=True)])
    done = subprocess.run([sys.executable, "-c", TELL, given, json.dumps(HEAVY)], capture_output=True, text=True, cwd=here)
    assert done.returncode == 0, done.stderr
    return dict(zip(REFUSED, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("line", REFUSED)
def test_it_is_told_in_one_line_without_the_libraries(told, line):
    code, said, there = told[line]
    assert code == 2 and REFUSED[line] in said and said.count("\n") == 1, said
    assert not there


@pytest.mark.parametrize("words", [{"adapter_rank": 4}, {"mask": "proxsparse", "pattern": "2:4"}])
def test_several_processes_are_told_what_takes_one_before_they_meet(words):
    from qprecon.llm.settings.beforehand import check_prune

    with pytest.raises(ValueError, match="which takes one process"):
        check_prune({"model": "M", **words}, Path("builtin"), alone=False)


def test_devices_that_are_refused_beforehand_are_refused_later_too():
    from qprecon.llm.model.loading import choose_device
    from qprecon.llm.settings.beforehand import check_device

    for word in ("cudda", "warp", "meta", "cuda:", "cpu:x", ""):
        for check in (lambda each: check_device(each, "device"), choose_device):
            with pytest.raises(ValueError, match="device"):
                check(word)
    for word in ("auto", "cpu", "cpu:0", None):
        check_device(word, "device")
        choose_device(word)


@pytest.mark.parametrize("word", ["rsh", "rhs"])
@pytest.mark.parametrize("backend", ["auto", "osqp", "pcg"])
def test_only_what_can_be_given_is_suggested(backend, word):
    from qprecon.llm.settings.beforehand import check_solver

    with pytest.raises(ValueError, match=f"'{word}'") as refusal:
        check_solver(backend, 1e-4, {word: 1})
    assert "did you mean 'rhs'" not in str(refusal.value)


def test_a_backends_quick_options_are_its_own():
    """What is looked at before its module is imported, and what is looked at with it."""
    import dataclasses
    import importlib

    from qprecon.contract import registry

    for record in registry.BUILT_IN:
        if record.installed:
            own, quick = importlib.import_module(record.target).Options, registry._looked_at(record)
            assert issubclass(own, quick) and dataclasses.fields(own) == dataclasses.fields(quick), record.name


def test_a_backend_whose_options_are_nowhere_is_broken():
    from qprecon.contract import registry
    from qprecon.contract.interface import Backend

    for takes in ("qprecon.nowhere:Options", "qprecon.wording:Options", "qprecon.wording:counted"):
        with pytest.raises(registry.BackendBrokenError, match="backend 'odd'"):
            registry.check_own_options(Backend("odd", "odd", "", takes=takes), {}, ())
