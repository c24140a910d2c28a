"""What cannot be done is one line that names the culprit, and exit code 2."""

import subprocess
import sys

import pytest
import torch

import qprecon
from qprecon import cli
from qprecon.llm.settings.aliases import ALIASES
from qprecon.llm.settings.other_words import OTHER_WORDS
from tests.cli.test_cli import COMMANDS


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
        (["--seqlen", "2048", "--calib", "no/set"], "the model has 128 positions: use --seqlen 128"),
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
    ("line", "meant"),
    [
        ("prune M O --prune_method wanda", "; here that is --mask."),
        ("prune M O --sparsity_ratio 0.5", "; here that is --sparsity."),
        ("prune M O --sparsity_type 2:4", "; here that is --pattern: which counts the weights KEPT"),
        ("prune M O --nsamples 4 --save out", "; here that is OUT, which has no flag"),
        ("prune M O --save_model out", "; here that is OUT, which has no flag"),
        ("prune --model M", "; did you mean MODEL, which has no flag?"),
        ("prune M O --wbits 4", "; here that is --quantize: int4 for 4 bits"),
        ("prune M O --bits=4", "; here that is --quantize: int4 for 4 bits"),
        ("prune M O --percdamp .01", "; here that is --damping."),
        ("prune M O --true-sequential", "; here that is --order."),
        ("prune M O --act-order", "; here that is --rounding: gptq-order"),
        ("prune M O --groupsize 128", "; here that is --group-size."),
        ("prune M O --group_size 128", "; did you mean --group-size?"),
        ("prune M O --batch-size 4", "unknown flag --batch-size."),  # nothing is near but the dashes
        ("prune M O --dataset c4", "; here that is --calib: a file of text or a name on the hub"),
        ("prune M O --num_calibration_samples 512", "; here that is --nsamples."),
        ("prune M O --max_seq_length 2048", "; here that is --seqlen."),
        ("prune M O --output_dir out", "; here that is OUT"),
        ("prune M O --eval_zero_shot", "`qprecon eval OUT --tasks"),
        ("prune M O --cache_dir x", "HF_HOME"),
        ("recover M D O --learning_rate 1e-4", "; here that is --lr."),
        ("eval M --dataset wikitext2", "; here that is --text"),
        ("eval M --num_fewshot 5", "without examples"),
        ("eval M --nsamples 5", "; here that is --max-windows."),
        ("solve P.npz --wbits 4", "unknown flag --wbits. All"),
    ],
)
def test_flags_of_other_tools_are_answered_with_ours(line, meant, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([*line.split(), *(["-o", "x.npz"] if line.startswith("solve") else [])])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and meant in error, error


def test_every_word_of_another_tool_leads_to_an_option_that_there_is():
    subparsers = next(action for action in cli._parser()._actions if action.dest == "command").choices.values()
    there = {action.dest for parser in subparsers for action in parser._actions}
    for word, (names, more) in OTHER_WORDS.items():
        assert names or more, word
        assert set(names) <= there, word
        assert word not in ALIASES or ALIASES[word] == names[0], word  # as in recipes


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


@pytest.mark.parametrize(
    ("command", "message", "expected"),
    [
        ("prune m o", "use seqlen=512.", "use --seqlen 512."),
        ("prune m o", "group_size=64 or 96 fits all layers", "--group-size 64 or 96 fits all layers"),
        ("prune m o", "give pattern=\"2:4\", damping=0.02", "give --pattern 2:4, --damping 0.02"),
        ("prune m o", "resume=False starts over", "--no-resume starts over"),
        ("prune m o", "or start over with resume=False", "or start over with --no-resume"),
        ("prune m o", "the file's seqlen is 5; model.nsamples=4", "the file's seqlen is 5; model.nsamples=4"),
        ("prune m o", "sparsity='50%' before, sparsity='60%' now", "--sparsity 50% before, --sparsity 60% now"),
        ("prune m o", "targets=['q_proj', 're:[ab]_proj'] before", "--targets q_proj 're:[ab]_proj' before"),
        ("prune m o", "mask_options={'block_size': 64, 'a': True}, x", "--mask-option block_size=64 --mask-option a=true, x"),
        ("prune m o", "needs mask_options={'masks': a dict}", "needs mask_options={'masks': a dict}"),
        ("prune m o", "pattern={'q_proj': '2:4'} now", "pattern={'q_proj': '2:4'} now"),
        ("prune m o", "calibration=…: tokens differ", "--calib …: tokens differ"),
        ("prune m o", "refine_options has no option 'x'", "--refine-option has no option 'x'"),
        ("prune m o", "known: model, mask_options, out", "known: model, mask_options, out"),
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
