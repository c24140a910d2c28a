import inspect
import json
import os
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import qprecon
from qprecon import cli
from qprecon.llm import perplexity
from qprecon.llm.model.targets import ATTENTION
from qprecon.llm.settings.fields import default_text, flag_of, options
from qprecon.llm.settings.recipe import Recipe
from qprecon.llm.settings.run import Run
from tests.llm.toy_text import toy_llama, toy_tokenizer, words

COMMANDS = ("prune", "recover", "eval", "report", "check-sparse", "solve", "backends", "demo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A toy model's folder and a text for it."""
    path = tmp_path_factory.mktemp("toy")
    toy_llama(positions=128).save_pretrained(path / "model")
    toy_tokenizer().save_pretrained(path / "model")
    (path / "calib.txt").write_text(words(400))
    (path / "held out.txt").write_text(words(100, start=3))
    return path


def options_of(command):
    parser = cli._parser()
    subparser = next(a for a in parser._actions if hasattr(a, "choices") and a.choices).choices[command]
    return {action.dest for action in subparser._actions}, subparser.format_help()


def test_help_loads_no_torch():
    code = f"""
import contextlib, io, sys
from qprecon import cli
for command in {COMMANDS!r}:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    assert "usage: qprecon " + command in text.getvalue()
print([name for name in ("torch", "jax", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_python_m_qprecon_runs_it():
    done = subprocess.run([sys.executable, "-m", "qprecon", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"qprecon {qprecon.__version__}"


def test_every_option_of_prune_is_an_argument_of_prune_model():
    destinations, text = options_of("prune")
    parameters = set(inspect.signature(qprecon.llm.prune_model).parameters)
    assert destinations - parameters == {"help", "quiet", "traceback", "skip_attention", "mask_file"}
    assert parameters - destinations == {"tokenizer"}
    assert "KEPT" in text and "PRUNED" in text  # N:M is counted the other way round in Wanda's and SparseGPT's scripts


def test_the_help_names_the_defaults():
    text = " ".join(options_of("prune")[1].split())
    for of in (Recipe, Run):
        for each, option in options(of):
            default = default_text(each, option)
            flag = flag_of(each.name, option)
            assert " ".join(option.help.split()) in text and flag in text, each.name
            last = f"--no{flag[1:]}" if f"{flag}, --no{flag[1:]} " in text else flag  # of switches the help names both words
            assert not default or f"(default {default})" in text.split(f"{last} ")[-1].split(" --")[0], each.name


def test_prune_hands_over_what_was_given(monkeypatch, folder, tmp_path):
    calls = []
    report = types.SimpleNamespace(summary=lambda: "the summary")
    monkeypatch.setattr(qprecon.llm, "prune_model", lambda *a, **k: calls.append((a, k)) or report)
    calib, out = str(folder / "calib.txt"), str(tmp_path)
    assert cli.main(["prune", "M", out, "--calib", calib, "--quiet"]) == 0
    texts = dict(model="M", calibration=Path(calib), out=out)
    assert calls[0] == ((), {**texts, "progress": "quiet", "device": "auto"})
    line = f"prune M {out} --pattern 2:4 --mask magnitude --update none --backend cholesky --nsamples 3 --seqlen 16 --seed 5"
    line += " --damping 0.5 --tol 0.1 --targets a b --ignore c --propagate dense --device cpu --dtype float32 --progress json"
    line += " --no-resume --calib"
    assert cli.main([*line.split(), calib]) == 0
    assert calls[1][1] == dict(
        **texts, pattern="2:4", mask="magnitude", update="none", backend="cholesky", nsamples=3, seqlen=16, seed=5,
        damping=0.5, tol=0.1, targets=["a", "b"], ignore=["c"], propagate="dense", device="cpu", dtype="float32", progress="json",
        resume=False,
    )  # fmt: skip
    line = f"prune M {out} --mask-file some.npz --mask-option orientation=NK --skip-attention --ignore c"
    assert cli.main([*line.split(), "--calib", calib]) == 0
    given = calls[2][1]
    assert given["mask"] == "given" and given["mask_options"] == {"masks": "some.npz", "orientation": "NK"}
    assert given["ignore"] == ["c", ATTENTION]
    line = f"prune M {out} --mask sparsegpt --mask-option block_size=64 --mask-option damping=0.1"
    assert cli.main([*line.split(), "--calib", calib]) == 0
    assert calls[3][1]["mask"] == "sparsegpt" and calls[3][1]["mask_options"] == {"block_size": 64, "damping": 0.1}
    line = f"prune M {out} --allocation owl --allocation-option lam=0.1 --allocation-option threshold=7"
    assert cli.main([*line.split(), "--calib", calib]) == 0
    assert calls[4][1]["allocation"] == "owl" and calls[4][1]["allocation_options"] == {"lam": 0.1, "threshold": 7}


def test_prune_then_eval(folder, tmp_path, capsys):
    out = tmp_path / "pruned"
    line = f"prune {folder / 'model'} {out} --calib {folder / 'calib.txt'} --nsamples 8 --seqlen 32 --backend cholesky"
    assert cli.main([*line.split(), "--device", "cpu"]) == 0
    assert "50.00%" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(out)
    weights = [module.weight for module in model.model.layers.modules() if isinstance(module, torch.nn.Linear)]
    assert sum(int((weight == 0).sum()) for weight in weights) == sum(weight.numel() for weight in weights) // 2
    assert cli.main(["eval", str(out), "--text", str(folder / "held out.txt"), "--seqlen", "32", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    expected = perplexity(model, words(100, start=3), tokenizer=toy_tokenizer(), seqlen=32)
    assert result["value"] == pytest.approx(float(expected))
    assert (result["windows"], result["seqlen"], result["bos"]) == (3, 32, "none")
    assert result["text"] == "held out.txt"


def test_masks_of_a_checkpoint_and_attention_left_alone(folder, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    common = f"--calib {folder / 'calib.txt'} --nsamples 8 --seqlen 32 --device cpu --backend cholesky --quiet"
    line = f"prune {folder / 'model'} {first} --mask magnitude --update none --sparsity 0.6 --skip-attention {common}"
    assert cli.main(line.split()) == 0
    line = f"prune {folder / 'model'} {second} --mask-file {first} --skip-attention {common}"
    assert cli.main(line.split()) == 0
    masked, solved = (AutoModelForCausalLM.from_pretrained(path) for path in (first, second))
    for a, b in zip(masked.model.layers, solved.model.layers, strict=True):
        assert torch.equal(a.mlp.up_proj.weight == 0, b.mlp.up_proj.weight == 0)
        assert not torch.equal(a.mlp.up_proj.weight, b.mlp.up_proj.weight)
        assert (a.self_attn.q_proj.weight != 0).all() and torch.equal(a.self_attn.q_proj.weight, b.self_attn.q_proj.weight)


def test_quiet_is_said_twice_without_harm(folder, tmp_path, capsys):
    model, text = str(folder / "model"), str(folder / "calib.txt")
    words = ["--calib", text, "--nsamples", "2", "--seqlen", "32", "--device", "cpu", "--quiet", "--progress", "quiet"]
    assert cli.main(["prune", model, str(tmp_path / "out"), "--update", "none", *words]) == 0
    assert capsys.readouterr().out == ""


def test_eval_says_that_it_leaves_an_adapter_out(folder, tmp_path, capsys):
    shutil.copytree(folder / "model", tmp_path / "model")
    text = str(folder / "calib.txt")
    command = ["eval", str(tmp_path / "model"), "--text", text, "--seqlen", "32", "--max-windows", "1", "--quiet"]
    assert cli.main(command) == 0 and "adapter" not in capsys.readouterr().err
    (tmp_path / "model" / "adapter").mkdir()
    (tmp_path / "model" / "adapter" / "adapter_config.json").write_text("{}")
    assert cli.main(command) == 0 and f"{tmp_path / 'model' / 'adapter'} is not loaded" in capsys.readouterr().err


def test_eval_prints_window_policy_and_text(folder, capsys):
    line = ["eval", str(folder / "model"), "--text", str(folder / "calib.txt"), "--seqlen", "64", "--max-windows", "2"]
    assert cli.main([*line, "--bos", "each", "--quiet", "--autocast", "bfloat16"]) == 0
    captured = capsys.readouterr()
    for part in ("calib.txt", "2 windows of 64 tokens", "BOS: each"):
        assert part in captured.out


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        (["--calib", "nowhere.txt"], "nowhere.txt"),
        (["--nsamples", "100"], "12 windows of 32; 100 wanted"),
        (["--mask", "wnada"], "wnada"),
        (["--backend", "choleski"], "choleski"),
        (["--mask", "wanda", "--mask-file", "masks.npz"], "leave one out"),
        (["--mask-file", "masks.npz"], "masks.npz"),
        (["--progress", "json", "--quiet"], "--quiet and --progress"),
        (["--nsamples", "0"], "nsamples must be at least 1"),
        (["--sparsity", "nan"], "sparsity must be a number, got nan"),
        (["--damping", "nan"], "damping must be a number, got nan"),
        (["--targets", "lm_head"], "lm_head, which is not pruned"),
        (["--seqlen", "2048", "--calib", "no/such/file"], "the model has 128 positions: use --seqlen 128"),
        (["--allocation", "owl", "--pattern", "2:4"], "no use for 2:4"),
        (["--mask", "sparsegpt", "--mask-option", "block=3"], "block"),
        (["--mask", "sparsegpt", "--mask-option", "damping=abc"], "damping must be a number, got 'abc'"),
        (["--mask", "proxsparse", "--pattern", "2:4", "--mask-option", "epochs=1.5"], "epochs must be a whole number, got 1.5"),
        (["--sparsity", "1.5"], "1.5"),
        (["--pattern", "2:5"], "2:5"),
        (["--targets", "no_such_layer"], "no_such_layer"),
        (["--device", "warp"], "warp"),
        (["--device", "meta"], "meta"),
        (["--dtype", "float33"], "dtype 'float33' cannot be used; use one of float16, bfloat16, float32, float64"),
        (["--dtype", "float8_e4m3fn"], "dtype 'float8_e4m3fn' cannot be used; use one of float16"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(folder, tmp_path, capsys, options, culprit):
    calib = [] if "--calib" in options else ["--calib", str(folder / "calib.txt")]
    small = [] if "--nsamples" in options else ["--nsamples", "4"]
    out = tmp_path / "out"
    command = ["prune", str(folder / "model"), str(out), "--seqlen", "32", "--device", "cpu", *calib, *small, *options]
    assert cli.main(command) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("qprecon prune: error: ") and culprit in error
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "culprits"),
    [
        ("--mask-option block_size", ("--mask-option", "'block_size'", "KEY=VALUE")),
        ("--allocation owl --allocation-option lam", ("--allocation-option", "'lam'", "KEY=VALUE")),
        ("--sparsity 0,5", ("--sparsity", "'0,5'", "did you mean 0.5?")),
        ("--sparsity half", ("--sparsity", "'half'", "a number")),
        ("--nsamples 1.5", ("--nsamples", "'1.5'", "a whole number")),
        ("--update adam", ("--update", "adam")),
        ("--sparsty 0.5", ("--sparsty", "did you mean --sparsity?")),
        ("--mask-opton=a=1", ("--mask-opton", "did you mean --mask-option?")),
        ("--wibble", ("unknown flag --wibble",)),
        ("--out elsewhere", ("unknown flag --out",)),
        ("--mask-opt a=1", ("--mask-opt", "did you mean --mask-option?")),
        ("extra", ("'extra' is one argument too many",)),
        ("--update optmal", ("--update", "'optmal'", "did you mean optimal?")),
    ],
)
def test_flags_that_cannot_be_read_name_themselves(capsys, options, culprits):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["prune", "M", "O", *options.split()])
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "qprecon prune --help" in error
    assert stopped.value.code == 2 and all(culprit in error for culprit in culprits)


@pytest.mark.parametrize(
    ("command", "culprit"),
    [([], "COMMAND"), (["prun", "M"], "did you mean prune?"), (["eval"], "MODEL"), (["recover", "M"], "DENSE, OUT"),
     (["eval", "M", "--txet", "a"], "did you mean --text?"), (["solve", "a.npz", "--tol", "small"], "--tol")],
)  # fmt: skip
def test_a_wrong_command_line_is_answered_in_one_line(capsys, command, culprit):
    with pytest.raises(SystemExit) as stopped:
        cli.main(command)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and culprit in error and "--help" in error


def test_what_is_not_there_is_answered_with_what_is(folder, tmp_path, capsys):
    model, text = str(folder / "model"), str(folder / "calib.txt")
    (tmp_path / "recipe.yaml").write_text("sparsity: 0.5")
    out = str(tmp_path / "out")
    for command, meant in (
        (["prune", str(folder / "modle"), out, "--calib", text], model),
        (["eval", str(folder / "modle"), "--text", text], model),
        (["prune", model, out, "--seqlen", "32", "--calib", str(folder / "clib.txt")], text),
        (["prune", model, out, "--calib", f"{text}:0,5", "--calib", "b.txt"], f"{text}:0.5"),
        (["prune", model, out, "--recipe", str(tmp_path / "recipe.yml")], str(tmp_path / "recipe.yaml")),
    ):
        assert cli.main(command) == 2
        assert f"did you mean {meant}?" in capsys.readouterr().err


def test_settings_are_checked_before_anything_is_fetched(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("qprecon.llm.calibration.texts.load_texts", lambda *_: pytest.fail("the text was fetched"))
    monkeypatch.setattr("qprecon.llm.calibration.windows.load_texts", lambda *_: pytest.fail("the text was fetched"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {folder / 'model'}\nout: {tmp_path / 'out'}\nnsamples: many\nseqlen: 4096")
    assert cli.main(["prune", "--recipe", str(recipe)]) == 2
    assert "nsamples must be a whole number" in capsys.readouterr().err
    recipe.write_text(recipe.read_text().replace("many", "4"))
    assert cli.main(["prune", "--recipe", str(recipe)]) == 2
    assert "windows of 4,096 tokens, but the model has 128 positions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "culprit"),
    [("--tasks piqa --seqlen 64", "seqlen"), ("--tasks piqa --bos each", "bos"), ("--text x --data-dir .", "data_dir"),
     ("--text x --limit 3", "limit")],
)  # fmt: skip
def test_eval_refuses_options_of_what_is_not_measured(capsys, options, culprit):
    assert cli.main(["eval", "some/model", *options.split()]) == 2
    assert f"{culprit} has no effect without" in capsys.readouterr().err


def test_bad_input_prints_no_traceback(folder):
    command = [sys.executable, "-m", "qprecon", "eval", "./none", "--text", str(folder / "calib.txt")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == ["qprecon eval: error: no such model folder: ./none"]


@pytest.mark.parametrize("error", [
    MemoryError("Unable to allocate 3 TiB"), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 TiB.\n More words."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 3 TiB"),
], ids=lambda error: type(error).__name__)  # fmt: skip
def test_no_memory_is_one_line(monkeypatch, capsys, error):
    def fail():
        raise error

    monkeypatch.setattr(qprecon, "available_backends", fail)
    assert cli.main(["backends"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("qprecon backends: error: out of memory (") and "3 TiB" in line and line.count("\n") == 1


def test_an_output_folder_that_holds_something_else_is_left_alone(folder, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    line = ["prune", str(folder / "model"), str(tmp_path), "--calib", str(folder / "calib.txt")]
    assert cli.main(line) == 2
    assert "something else" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_without_calib_and_datasets_it_says_what_to_give(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert cli.main(["prune", str(folder / "model"), str(tmp_path / "out"), "--seqlen", "32"]) == 2
    error = capsys.readouterr().err
    assert "pip install 'qprecon[eval]'" in error and "builtin" in error and "text file" in error


def test_sparsity_and_pattern_exclude_each_other(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["prune", "M", "O", "--sparsity", "0.5", "--pattern", "2:4"])
    assert stopped.value.code == 2 and "not allowed with" in capsys.readouterr().err


def test_traceback_on_request_and_for_our_own_mistakes(monkeypatch, capsys):
    def fail(error):
        def available_backends():
            raise error

        monkeypatch.setattr(qprecon, "available_backends", available_backends)

    fail(ValueError("bad\nvalue"))
    assert cli.main(["backends"]) == 2
    assert capsys.readouterr().err == "qprecon backends: error: bad value\n"
    with pytest.raises(ValueError, match="bad"):
        cli.main(["backends", "--traceback"])
    fail(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["backends"])
    fail(KeyboardInterrupt())
    assert cli.main(["backends"]) == 130


STOPPED = """
import os, signal, sys
from qprecon import cli
from qprecon.llm.storage import sources

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and what they start
signal.signal(signal.SIGTERM, signal.SIG_DFL)
finish = sources.DiskBlocks.finish
def finish_and_stop(source, index, *more):
    finish(source, index, *more)
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
sources.DiskBlocks.finish = finish_and_stop
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(("name", "word", "code"), [("SIGINT", "interrupted", 130), ("SIGTERM", "terminated", 143)])
def test_a_run_that_is_told_to_end_says_how_to_go_on(folder, tmp_path, capsys, name, word, code):
    line = f"prune {folder / 'model'} {tmp_path / 'out'} --calib {folder / 'calib.txt'} --nsamples 4 --seqlen 32 --update none"
    line = [*line.split(), "--device", "cpu"]
    done = subprocess.run([sys.executable, "-c", STOPPED, name, *line, "--quiet"], capture_output=True, text=True)
    assert done.stderr.splitlines() == [f"qprecon: {word}; the same command goes on after the last finished block"]
    assert done.returncode == code
    assert cli.main(line) == 0
    assert "continued after 1 of" in capsys.readouterr().out


STOPPED_TWICE = """
import os, signal, sys, threading, time
from qprecon import cli
from qprecon.llm.storage import sources

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
when, name = sys.argv[1:3]
del sys.argv[1:3]
number = getattr(signal, name)
def now():
    os.kill(os.getpid(), number)
    time.sleep(60)  # a tidy end would take that long
finish, stop = sources.DiskBlocks.finish, sources.DiskBlocks.stop
def finish_and_stop(source, index, *more):
    finish(source, index, *more)
    os.kill(os.getpid(), number)
sources.DiskBlocks.finish = finish_and_stop
if when == "tidying up":
    sources.DiskBlocks.stop = lambda source: now()
elif when == "saying so":
    class Slow:
        def write(self, text):
            now()
        def isatty(self):
            return False
        flush = lambda self: None
    sys.stderr = Slow()
else:
    threading._register_atexit(now)
sys.exit(cli.main())
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("when", ["tidying up", "saying so", "shutting down"])
def test_a_second_signal_ends_it_at_once_with_the_same_code(folder, tmp_path, when, name, code):
    line = f"prune {folder / 'model'} {tmp_path / 'out'} --calib {folder / 'calib.txt'} --nsamples 4 --seqlen 32 --update none"
    command = [sys.executable, "-c", STOPPED_TWICE, when, name, *line.split(), "--device", "cpu", "--quiet"]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and "Traceback" not in done.stderr
    assert time.monotonic() - started < 55
    assert cli.main([*line.split(), "--device", "cpu", "--quiet"]) == 0  # nothing is broken by that


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_command_that_leaves_nothing_behind_says_only_that_it_ended():
    code = """
import os, signal, sys, qprecon
from qprecon import cli
signal.signal(signal.SIGTERM, signal.SIG_DFL)
qprecon.available_backends = lambda: os.kill(os.getpid(), signal.SIGTERM)
code = cli.main(["backends"])
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # whoever set that means it
qprecon.available_backends = lambda: os.kill(os.getpid(), signal.SIGTERM) or {}
assert cli.main(["backends"]) == 0
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 143 and done.stderr == "qprecon: terminated\n"


def test_backends_are_listed_with_their_extras(capsys):
    assert cli.main(["backends"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    facts = qprecon.available_backends()
    assert set(rows) == set(facts)
    for name, row in rows.items():
        assert facts[name]["summary"] in row and facts[name]["extra"] in row
        assert (" yes " in row.split("cpu")[0]) or not facts[name]["installed"]


@pytest.fixture
def problem():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((40, 12))
    return dict(H=x.T @ x, W=generator.standard_normal((12, 5)), mask=generator.random((12, 5)) < 0.5)


def test_solve_writes_what_solve_returns(problem, tmp_path, capsys):
    np.savez(tmp_path / "problem.npz", **problem)
    out = tmp_path / "deep" / "result"
    command = ["solve", str(tmp_path / "problem.npz"), "-o", str(out), "--backend", "cholesky", "--damping", "0.01"]
    assert cli.main(command) == 0
    solution = qprecon.solve(**problem, backend="cholesky", damping=0.01)
    with np.load(out) as file:
        saved = dict(file)
    assert np.array_equal(saved["weights"], solution.weights)
    assert np.array_equal(saved["gap_bound"], solution.gap_bound)
    assert saved["status"].tolist() == ["OPTIMAL"] * 5
    assert "5 of 5 columns certified" in capsys.readouterr().out


def test_solve_takes_an_explicit_rhs(problem, tmp_path):
    rhs = problem["H"] @ problem["W"] + 1.0
    np.savez(tmp_path / "problem.npz", **problem, rhs=rhs)
    assert cli.main(["solve", str(tmp_path / "problem.npz"), "-o", str(tmp_path / "o.npz"), "--backend", "cholesky"]) == 0
    expected = qprecon.solve(**problem, rhs=rhs, backend="cholesky").weights
    assert np.array_equal(np.load(tmp_path / "o.npz")["weights"], expected)
    assert not np.allclose(expected, qprecon.solve(**problem, backend="cholesky").weights)


def test_solve_says_by_exit_code_that_a_column_is_not_certified(problem, tmp_path):
    np.savez(tmp_path / "problem.npz", **problem)
    command = ["solve", str(tmp_path / "problem.npz"), "-o", str(tmp_path / "o.npz"), "--backend", "cholesky"]
    assert cli.main([*command, "--tol", "1e-40"]) == 1
    assert "OPTIMAL" not in np.load(tmp_path / "o.npz")["status"].tolist()
    problem["W"][0, 2] = np.nan
    np.savez(tmp_path / "problem.npz", **problem)
    assert cli.main(command) == 1
    statuses = np.load(tmp_path / "o.npz")["status"].tolist()
    assert [i for i, status in enumerate(statuses) if status != "OPTIMAL"] == [2]


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        (lambda p: p.pop("mask"), "lacks mask"),
        (lambda p: p.update(hessian=p["H"]), "unknown hessian"),
        (lambda p: p.update(H=p["H"][:, :5]), "H"),
        (lambda p: p.update(mask=p["mask"] * 2), "mask"),
        (lambda p: p["H"].__setitem__((0, 0), np.nan), "H"),
    ],
)
def test_solve_names_what_is_wrong_with_a_file(problem, tmp_path, capsys, change, culprit):
    change(problem)
    np.savez(tmp_path / "problem.npz", **problem)
    assert cli.main(["solve", str(tmp_path / "problem.npz"), "-o", str(tmp_path / "o.npz")]) == 2
    assert culprit in capsys.readouterr().err
    assert not (tmp_path / "o.npz").exists()


def test_solve_refuses_a_place_it_cannot_write_to_before_it_solves(problem, tmp_path, capsys, monkeypatch):
    np.savez(tmp_path / "problem.npz", **problem)
    (tmp_path / "file").write_text("kept")
    monkeypatch.setattr(qprecon, "solve", lambda *a, **k: pytest.fail("it was solved"))

    def refused(out):
        assert cli.main(["solve", str(tmp_path / "problem.npz"), "-o", str(out)]) == 2
        error = capsys.readouterr().err
        assert f"-o {out}" in error
        return error

    assert f"folder {tmp_path / 'file'} cannot be made (File exists" in refused(tmp_path / "file" / "o.npz")
    assert f"(Not a directory: {tmp_path / 'file' / 'deep'})" in refused(tmp_path / "file" / "deep" / "o.npz")
    assert "is a folder; give the name of a file" in refused(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert f"the folder {tmp_path} is not writable" in refused(tmp_path / "o.npz")
    assert "the file is not writable" in refused(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept" and not (tmp_path / "o.npz").exists()


def test_solve_refuses_other_files(tmp_path, capsys):
    (tmp_path / "text.npz").write_text("not arrays")
    (tmp_path / "empty.npz").touch()
    np.save(tmp_path / "single.npy", np.eye(3))
    for name in ("text.npz", "empty.npz", "single.npy", "none.npz"):
        assert cli.main(["solve", str(tmp_path / name), "-o", str(tmp_path / "o.npz")]) == 2
        assert name in capsys.readouterr().err


def test_torch_is_not_left_in_another_state(folder, capsys):
    before = torch.random.get_rng_state()
    cli.main(["eval", str(folder / "model"), "--text", str(folder / "calib.txt"), "--seqlen", "64", "--quiet"])
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_quiet_command_shows_no_bars_of_libraries_either(folder):
    line = ["eval", str(folder / "model"), "--text", str(folder / "calib.txt"), "--seqlen", "64", "--quiet"]
    done = subprocess.run([sys.executable, "-m", "qprecon", *line], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout and done.stderr == ""


def test_solve_does_not_overwrite_its_problem(tmp_path, capsys):
    path = tmp_path / "p.npz"
    np.savez(path, H=np.eye(3), W=np.ones((3, 2)), mask=np.ones((3, 2)))
    before = path.read_bytes()
    assert cli.main(["solve", str(path), "-o", str(path)]) == 2
    assert "overwrite" in capsys.readouterr().err and path.read_bytes() == before


UNREADABLE = [
    "", "wibble", "--wibble", *(f"{command} --wibble" for command in COMMANDS),
    *(f"{command} a b c d e" for command in COMMANDS if command != "report"),
    "prune m o --preset wibble", "prune m o --mask", "prune m o --seed 1e3", "solve", "eval", "recover m",
]  # fmt: skip


@pytest.mark.parametrize("line", UNREADABLE)
def test_what_cannot_be_parsed_is_one_line_that_says_where_all_is_listed(line, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(line.split())
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and len(said) < 400 and "--help" in said, said


@pytest.mark.parametrize("command", [
    ["prune", "MODEL", "OUT", "--calib", ""], ["prune", "MODEL", " "], ["prune", "MODEL", ""],
    ["eval", "MODEL", "--seqlen", "32", "--text", ""],
])  # fmt: skip
def test_an_empty_name_is_said_to_be_empty(command, folder, tmp_path, capsys):
    names = {"MODEL": str(folder / "model"), "OUT": str(tmp_path / "out")}
    assert cli.main([names.get(word, word) for word in command]) == 2
    assert "name of" in (err := capsys.readouterr().err) and "is empty" in err


@pytest.mark.skipif(os.name != "posix", reason="pipes of a POSIX shell")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_who_stops_reading_is_no_error(unbuffered):
    process = subprocess.Popen(
        [sys.executable, "-m", "qprecon", "backends"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 141


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_devices_that_the_environment_hides(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["prune", str(folder / "model"), str(tmp_path / "out"), "--device", "cuda"]) == 2
    assert "CUDA_VISIBLE_DEVICES='' leaves no CUDA device" in capsys.readouterr().err


def test_a_tilde_in_a_recipe_is_the_home(folder, tmp_path, monkeypatch):
    """No shell expands what stands in a file."""
    monkeypatch.setenv("HOME", str(folder))
    (tmp_path / "recipe.yaml").write_text(
        "model: ~/model\nout: ~/of a recipe\ncalibration: ~/calib.txt\nnsamples: 2\nseqlen: 16\nupdate: none\ndevice: cpu\n"
    )
    assert cli.main(["prune", "--recipe", str(tmp_path / "recipe.yaml"), "--quiet"]) == 0
    assert (folder / "of a recipe" / "recipe.yaml").is_file()
    (tmp_path / "recipe.yaml").write_text(
        "model: ~/model\nout: ~/another\nmask_file: ~/of a recipe\ncalibration: ~/calib.txt\nnsamples: 2\nseqlen: 16\n"
    )
    assert cli.main(["prune", "--recipe", str(tmp_path / "recipe.yaml"), "--quiet"]) == 0


NOBODYS = (
    "prune ~nobody-here/m out --calib builtin", "prune {model} out --seqlen 16 --calib ~nobody-here/t.txt",
    "eval ~nobody-here/m --text builtin", "prune {model} out --calib builtin --mask-file ~nobody-here/m",
)  # fmt: skip


@pytest.mark.parametrize("line", NOBODYS)
def test_the_home_of_nobody_is_a_name(line, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main([word.format(model=folder / "model") for word in line.split()]) == 2
    assert "nobody-here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message", "expected"),
    [
        ("prune m o", "use seqlen=512.", "use --seqlen 512."),
        ("prune m o", "group_size=64 or 96 fits all layers", "--group-size 64 or 96 fits all layers"),
        ("prune m o", "give pattern=\"2:4\", damping=0.02", "give --pattern 2:4, --damping 0.02"),
        ("prune m o", "resume=False starts over", "--no-resume starts over"),
        ("prune m o", "or start over with resume=False", "or start over with --no-resume"),
        ("prune m o", "the file's seqlen is 5; model.nsamples=4", "the file's seqlen is 5; model.nsamples=4"),
        ("recover m d o", "give optimizer_state='host' or checkpointing=True", "give --optimizer-state host or --checkpointing"),
    ],
)
def test_errors_name_options_as_the_command_takes_them(command, message, expected):
    parser = cli._parser().parse_args(command.split()).parser
    assert parser.in_flags(message) == expected


def test_an_error_of_the_library_names_flags(folder, capsys):
    line = ["eval", str(folder / "model"), "--text", str(folder / "calib.txt"), "--seqlen", "256", "--quiet"]
    assert cli.main(line) == 2
    assert "--seqlen 128" in capsys.readouterr().err
