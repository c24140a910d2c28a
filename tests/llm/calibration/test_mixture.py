"""Calibration from several sources: exact counts, windows of one source each, the same every time."""

import gzip
import json

import pytest
import torch

from qprecon.cli import main
from qprecon.llm import Mixture, PruneReport, prune_model
from qprecon.llm.calibration.mixture import as_mixture, mixture_windows, named_calibration
from qprecon.llm.calibration.sampling import calibration_windows
from qprecon.llm.settings.recipe_file import load_recipe
from tests.llm.families import build, tokens
from tests.llm.toy_text import toy_llama, toy_tokenizer, words


@pytest.mark.parametrize(("shares", "nsamples", "counts"), [
    ((0.7, 0.3), 128, [90, 38]),  # 89.6 and 38.4
    ((0.5, 0.5), 129, [65, 64]),  # the first of equal remainders
    ((None, None, None), 128, [43, 43, 42]),
    ((None, 0.3), 10, [7, 3]),
    ((None, None, 0.5), 10, [3, 2, 5]),
    ((0.333, 0.333, 0.333), 9, [3, 3, 3]),
    ((0.1, 0.2, 0.7), 10, [1, 2, 7]),  # in binary these miss whole numbers
    ((1 / 3, 2 / 3), 3, [1, 2]),
    ((1.0,), 5, [5]),
    ((0.015, 0.985), 128, [2, 126]),
])  # fmt: skip
def test_counts_add_up_exactly_by_largest_remainder(shares, nsamples, counts):
    mixture = Mixture(tuple((f"{i}.txt", share) for i, share in enumerate(shares)))
    assert mixture.counts(nsamples) == counts and sum(counts) == nsamples
    assert sum(mixture.shares()) == pytest.approx(1)


def test_any_shares_give_all_windows():
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        parts = torch.rand(int(torch.randint(1, 6, (1,), generator=generator)), generator=generator) + 0.2
        nsamples = int(torch.randint(40, 500, (1,), generator=generator))
        mixture = Mixture(tuple((f"{i}.txt", round(float(part), 6)) for i, part in enumerate(parts / parts.sum())))
        counts = mixture.counts(nsamples)
        assert sum(counts) == nsamples
        assert all(abs(count - share * nsamples) < 1 for count, share in zip(counts, mixture.shares(), strict=True))


@pytest.mark.parametrize(("sources", "said"), [
    ([("a.txt", 0.7), ("b.txt", 0.7)], r"add up to 1\.4, not to 1"),
    ([("a.txt", 0.4), ("b.txt", 0.5)], r"add up to 0\.9, not to 1"),
    ([("a.txt", 1.0), ("b.txt", None)], r"add up to 1, which leaves nothing for b\.txt"),
    ([("a.txt", 0.0), ("b.txt", 1.0)], r"share of a\.txt must be above 0 .*got 0"),
    ([("a.txt", 30), ("b.txt", 70)], "at most 1, got 30"),
    ([("a.txt", -0.5), ("b.txt", 0.5)], r"a\.txt .*got -0\.5"), ([("a.txt", float("nan")), ("b.txt", 0.5)], "got nan"),
    ([("a.txt", 0.5), ("a.txt", 0.5)], r"a\.txt is there twice"), ([], "at least one source"),
    ([("a.txt", "half"), ("b.txt", 0.5)], "got 'half'"), ([("a.txt", True)], "got True"),
])  # fmt: skip
def test_shares_that_make_no_sense(sources, said):
    with pytest.raises(ValueError, match=said):
        Mixture(tuple(sources))


def test_a_source_that_would_get_no_window_is_named():
    with pytest.raises(ValueError, match=r"0\.16 of 16 windows would be from b\.txt, which is none"):
        Mixture((("a.txt", 0.99), ("b.txt", 0.01))).counts(16)


def test_what_is_a_mixture_and_what_is_not():
    ids = torch.arange(12).reshape(2, 6)
    for given in (
        [("a.txt", 0.7), ("b.txt", 0.3)], (["a.txt", 0.7], ["b.txt", None]), [(ids, 0.5), ("a.txt", 0.5)], [(["a b", "c"], 1)],
    ):  # fmt: skip
        assert as_mixture(given).sources == tuple(map(tuple, given))
    for other in (
        "a.txt", ["a.txt", "b.txt"], [[1, 2], [3, 4]], (ids, torch.ones_like(ids)), [(ids, torch.ones_like(ids))], ids, [],
        [(ids, None)], {"input_ids": ids}, [("a.txt", 0.7), "b.txt"], 3,
    ):  # fmt: skip
        assert as_mixture(other) is None


def test_no_window_holds_text_of_two_sources_and_each_is_what_the_source_alone_gives():
    a, b, tokenizer = words(30 * 16 + 5), " ".join(["w59"] * 300), toy_tokenizer()
    mixture = Mixture(((a, 0.75), ([b], 0.25)))
    drawn = mixture_windows(mixture, tokenizer=tokenizer, nsamples=16, seqlen=16, seed=3)
    assert drawn.shape == (16, 16)
    of_b = (drawn == tokenizer("w59")["input_ids"][0]).sum(1)
    assert sorted(of_b.tolist())[-4:] == [16] * 4 and (of_b < 16).sum() == 12
    alone = torch.cat([
        calibration_windows(a, tokenizer=tokenizer, nsamples=12, seqlen=16, seed=3),
        calibration_windows([b], tokenizer=tokenizer, nsamples=4, seqlen=16, seed=3),
    ])  # fmt: skip
    assert sorted(map(tuple, drawn.tolist())) == sorted(map(tuple, alone.tolist()))
    assert not torch.equal(drawn, alone)  # mixed, so that a part of the windows is a part of the mixture
    assert torch.equal(drawn, mixture_windows(mixture, tokenizer=tokenizer, nsamples=16, seqlen=16, seed=3))
    assert not torch.equal(drawn, mixture_windows(mixture, tokenizer=tokenizer, nsamples=16, seqlen=16, seed=4))


def test_one_source_is_what_it_is_without_a_mixture():
    plain = calibration_windows(words(500), tokenizer=toy_tokenizer(), nsamples=7, seqlen=16)
    drawn = mixture_windows(Mixture(((words(500), None),)), tokenizer=toy_tokenizer(), nsamples=7, seqlen=16, seed=0)
    assert torch.equal(drawn, plain)


def test_a_source_that_cannot_give_its_windows_is_named(tmp_path):
    (tmp_path / "long.txt").write_text(words(2000))
    (tmp_path / "short.txt").write_text(words(40))
    mixture = Mixture(((tmp_path / "long.txt", 0.5), (tmp_path / "short.txt", 0.5)))
    with pytest.raises(ValueError, match=r"calibration source .*short\.txt: too little.*40 tokens gives 2 windows of 16; 4 wanted"):
        mixture_windows(mixture, tokenizer=toy_tokenizer(), nsamples=8, seqlen=16, seed=0)


def test_every_source_is_found_before_one_is_tokenised(tmp_path):
    class Never:
        bos_token_id = None

        def __call__(self, *_, **__):
            pytest.fail("a text was tokenised")

    (tmp_path / "a.txt").write_text(words(100))
    mixture = Mixture(((tmp_path / "a.txt", 0.5), (tmp_path / "b.txt", 0.5)))
    with pytest.raises(FileNotFoundError, match=r"no such text file.*b\.txt"):
        mixture_windows(mixture, tokenizer=Never(), nsamples=4, seqlen=8, seed=0)


# On the command line and in recipes


@pytest.mark.parametrize(("given", "sources"), [
    (["a.txt", "b.jsonl.gz:0.3"], [("a.txt", None), ("b.jsonl.gz", 0.3)]), (["a.txt:70%", "c4:30%"], [("a.txt", 0.7), ("c4", 0.3)]),
    (["a:b.txt:0.5", "c:d"], [("a:b.txt", 0.5), ("c:d", None)]),
    (["C:\\texts\\a.txt", "b.txt:1e-1"], [("C:\\texts\\a.txt", None), ("b.txt", 0.1)]),
    (["a.txt:1"], [("a.txt", 1.0)]),
])  # fmt: skip
def test_names_with_shares(given, sources):
    found = named_calibration(given)
    assert [str(name) for name, _ in found.sources] == [name for name, _ in sources]
    assert [share for _, share in found.sources] == [share and pytest.approx(share) for _, share in sources]


def test_a_file_of_that_very_name_is_meant_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes:0.3").write_text(words(500))
    assert str(named_calibration("notes:0.3")) == "notes:0.3"
    mixture = named_calibration(["notes:0.3:0.6", "other.txt:0.4"])
    assert [(str(name), share) for name, share in mixture.sources] == [("notes:0.3", 0.6), ("other.txt", 0.4)]
    assert str(named_calibration("c4")) == "c4" and str(named_calibration(["c4"])) == "c4"


@pytest.fixture
def folder(tmp_path):
    toy_llama().save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text(words(900))
    rows = "".join(json.dumps({"text": words(50, start=i)}) + "\n" for i in range(20))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    return tmp_path


OPTIONS = ["--nsamples", "10", "--seqlen", "16", "--update", "none"]


def test_prune_with_a_mixture(folder, capsys):
    line = ["prune", str(folder / "model"), str(folder / "out"), "--calib", str(folder / "a.txt")]
    line += ["--calib", f"{folder / 'b.jsonl.gz'}:0.3"]
    assert main([*line, *OPTIONS]) == 0
    settings = PruneReport.load(folder / "out").settings
    assert settings["calibration_sources"] == [
        {"source": str(folder / "a.txt"), "share": 0.7, "windows": 7},
        {"source": str(folder / "b.jsonl.gz"), "share": 0.3, "windows": 3},
    ]
    said = f"{folder / 'a.txt'} (70 %, 7 windows) and {folder / 'b.jsonl.gz'} (30 %, 3 windows)"
    assert settings["calibration"] == said and said in (folder / "out" / "README.md").read_text()
    # the recipe that is saved does the same again
    recipe = load_recipe(folder / "out" / "recipe.yaml")
    assert recipe["calibration"] == [str(folder / "a.txt"), f"{folder / 'b.jsonl.gz'}:0.3"]
    assert main(["prune", "--recipe", str(folder / "out" / "recipe.yaml"), str(folder / "model"), str(folder / "again")]) == 0
    files = [(folder / out / "model.safetensors").read_bytes() if (folder / out / "model.safetensors").is_file() else b"".join(
        path.read_bytes() for path in sorted((folder / out).glob("*.safetensors"))) for out in ("out", "again")]  # fmt: skip
    assert files[0] == files[1]
    # and Python too
    report = prune_model(
        folder / "model", [(folder / "a.txt", 0.7), (str(folder / "b.jsonl.gz"), 0.3)], out=folder / "python", progress=False,
        nsamples=10, seqlen=16, update="none",
    )  # fmt: skip
    assert report.settings["calibration"] == said
    assert [row.error_masked for row in report.layers] == [row.error_masked for row in PruneReport.load(folder / "out").layers]


@pytest.mark.parametrize(("calib", "said"), [
    (["a.txt:0.9", "b.jsonl.gz:0.3"], "shares add up to 1.2, not to 1"),
    (["a.txt", "nowhere.txt:0.3"], "no such text file: nowhere.txt"), (["a.txt:0.5"], "shares add up to 0.5"),
    (["a.txt", "a.txt:0.5"], "a.txt is there twice"), (["a.txt:0.99", "b.jsonl.gz:0.01"], "which is none"),
    (["a.txt", "b.jsonl.gz:0"], "share of b.jsonl.gz must be above 0"),
])  # fmt: skip
def test_what_the_command_says_of_bad_mixtures(calib, said, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    assert main(["prune", "model", "out", *(word for each in calib for word in ("--calib", each)), *OPTIONS, "--quiet"]) == 2
    assert said in capsys.readouterr().err and not (folder / "out").exists()


def test_tokens_and_texts_in_one_mixture():
    """Without a tokenizer too, where all sources are tokens."""
    long, rows = tokens(1, 400)[0], tokens(6, 32, seed=5)
    report = prune_model(build("llama"), [(long, 0.5), (rows, 0.5)], nsamples=8, seqlen=32, progress=False, update="none")
    assert report.settings["calibration"] == "tokens (400,) (50 %, 4 windows) and tokens (6, 32) (50 %, 4 windows)"
    with pytest.raises(ValueError, match="tokenizer"):
        prune_model(build("llama"), [(long, 0.5), ("some text of words", 0.5)], nsamples=8, seqlen=32, progress=False)
