"""Recipes: one vocabulary, wrong keys named, other tools' words, and what YAML does to numbers."""

import inspect

import pytest
import yaml

from qprecon import cli
from qprecon.llm import prune_model
from qprecon.llm.recipe import ALIASES, Recipe, _Keys, command_recipe, load_recipe

from .toy_text import toy_llama, toy_tokenizer, words


def written(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_keys_are_prune_models_arguments_and_aliases_point_at_them():
    arguments = set(inspect.signature(prune_model).parameters) - {"tokenizer"}
    assert set(_Keys.model_fields) == arguments
    assert set(ALIASES.values()) <= arguments and not set(ALIASES) & arguments


def test_yaml_1_1_does_not_spoil_patterns_and_numbers(tmp_path):
    path = written(tmp_path, "pattern: 2:4\ntol: 1e-6\nmask: no\nnsamples: 12\nignore: [re:.*3$, lm_head]\n")
    assert yaml.safe_load(path.read_text())["pattern"] == 124  # what would have been asked for
    assert dict(load_recipe(path)) == dict(
        pattern="2:4", tol=1e-6, mask="no", nsamples=12, ignore=["re:.*3$", "lm_head"]
    )


def test_a_recipe_reads_back_as_it_was_written(tmp_path):
    recipe = Recipe(dict(model="1e5", out="no", pattern={"q_proj": "2:4", "re:.*": 0.5}, tol=1e-7, seed=3, targets=["123"]))
    recipe.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
    assert dict(load_recipe(tmp_path / "recipe.yaml")) == dict(recipe)
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text()) == dict(recipe)


@pytest.mark.parametrize(
    ("text", "culprits"),
    [
        ("sparsty: 0.5", ("'sparsty'", "did you mean 'sparsity'?")),
        ("prune-method: wanda", ("'prune-method'", "'prune_method'")),
        ("nsampels: 4", ("did you mean 'nsamples'?",)),
        ("tokenizer: x", ("unknown key 'tokenizer'",)),
        ("wibble: 1", ("'wibble'", "known: model, calibration, sparsity")),
        ("nsamples: '128'", ("nsamples: '128'", "integer")),
        ("nsamples: 1.5", ("nsamples: 1.5", "integer")),
        ("damping: much", ("damping: 'much'", "number")),
        ("targets: 3", ("targets: 3", "string", "list")),
        ("seed: 1\nseed: 2", ("'seed'", "twice")),
        ("calib: a.txt\ncalibration: b.txt", ("'calib' and 'calibration'",)),
        ("sparsity: 0.6\npattern: 2:4", ("0.6 contradicts pattern '2:4'",)),
        ("mask_structure: 1:4", ("mask_structure '1:4'", "kept or pruned")),
        ("sparsity_type: half", ("half",)),
        ("pattern: 5:4", ("5:4",)),
        ("- sparsity", ("a recipe is a mapping",)),
        ("a: [", ("not YAML",)),
        ("model: !!python/object/apply:os.getcwd []", ("not YAML",)),
    ],
)
def test_a_bad_recipe_names_the_culprit(tmp_path, text, culprits):
    with pytest.raises(ValueError) as error:
        recipe = load_recipe(written(tmp_path, text))
        recipe.overridden({}).effective()
    for culprit in culprits:
        assert culprit in str(error.value)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("sparsity_ratio: 0.7\nsparsity_type: unstructured\nprune_method: magnitude", dict(sparsity=0.7, mask="magnitude")),
        ("sparsity_ratio: 0.5\nsparsity_type: 4:8", dict(pattern="4:8")),
        ("sparsity_type: 1:4\nsave_model: o", dict(pattern="3:4", out="o")),  # Wanda counts the pruned
        ("sparsity: 0.5\nmask_structure: '2:4'\ndampening_frac: 0.001", dict(pattern="2:4", damping=0.001)),
        ("sparsity: 0.6\nmask_structure: '0:0'\ntargets: [Linear]\nignore: ['re:.*lm_head']",
         dict(sparsity=0.6, ignore=["re:.*lm_head"])),
    ],
)  # fmt: skip
def test_the_words_of_other_tools(tmp_path, text, arguments):
    assert dict(load_recipe(written(tmp_path, text))) == arguments


def test_flags_go_before_the_recipe(tmp_path):
    path = written(tmp_path, "model: M\nout: O\npattern: 2:4\nseed: 3\n")
    assert dict(command_recipe(path, {"sparsity": 0.7, "seed": 4})) == dict(
        model="M", out="O", sparsity=0.7, seed=4, calibration="c4", device="auto"
    )
    assert command_recipe(path, {"pattern": "4:8"})["pattern"] == "4:8"
    options = Recipe({"mask": "thanos", "mask_options": {"a": 1, "b": 2}})
    assert options.overridden({"mask_options": {"b": 3}})["mask_options"] == {"a": 1, "b": 3}
    assert "mask_options" not in options.overridden({"mask": "wanda"})  # options of another mask
    owl = Recipe({"allocation": "owl", "allocation_options": {"lam": 0.1}})
    assert owl.overridden({"allocation_options": {"threshold": 3}})["allocation_options"] == {"lam": 0.1, "threshold": 3}
    assert "allocation_options" not in owl.overridden({"allocation": "uniform"})
    with pytest.raises(ValueError, match="MODEL is missing"):
        command_recipe(None, {})


def stored(folder):
    """The bytes of all weights of a model folder."""
    files = sorted(folder.glob("*.safetensors"))
    assert files
    return b"".join(file.read_bytes() for file in files)


def test_prune_by_recipe_saves_the_effective_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    toy_llama(positions=128).save_pretrained("model")
    toy_tokenizer().save_pretrained("model")
    (tmp_path / "calib.txt").write_text(words(400))
    written(tmp_path, "model: model\nout: out\nsparsity_ratio: 0.25\nnsamples: 8\nseqlen: 32\nbackend: cholesky\ncalib: calib.txt")
    assert cli.main(["prune", "--recipe", "recipe.yaml", "--seed", "3", "--device", "cpu", "--quiet"]) == 0
    saved = load_recipe("out/recipe.yaml")
    defaults = {name: p.default for name, p in inspect.signature(prune_model).parameters.items()}
    assert saved["sparsity"] == 0.25 and saved["seed"] == 3 and saved["calibration"] == "calib.txt"
    assert saved["damping"] == defaults["damping"] and saved["propagate"] == defaults["propagate"]
    first = stored(tmp_path / "out")
    assert cli.main(["prune", "--recipe", "out/recipe.yaml", "--quiet"]) == 0  # the saved one does the same again
    assert stored(tmp_path / "out") == first
    assert dict(load_recipe("out/recipe.yaml")) == dict(saved)
    assert cli.main(["prune", "--recipe", "none.yaml"]) == 2
    assert "no such recipe: none.yaml" in capsys.readouterr().err
