"""Recipes: one vocabulary, wrong keys named, other tools' words, and what YAML does to numbers."""

import inspect

import pytest
import yaml

from qprecon import cli
from qprecon.llm import prune_model
from qprecon.llm.model.targets import ATTENTION
from qprecon.llm.pruning.recipe import ALIASES, Recipe, _Keys, command_recipe, load_recipe
from tests.llm.toy_text import toy_llama, toy_tokenizer, words


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
        ("sparsity_ratio: 0.5\nsparsity_type: 1:4", dict(pattern="3:4")),  # its script demands the 0.5
        ("sparsity_type: 1:4\nsave_model: o", dict(pattern="3:4", out="o")),  # Wanda counts the pruned
        ("sparsity: 0.5\nmask_structure: '2:4'\ndampening_frac: 0.001", dict(pattern="2:4", damping=0.001)),
        ("sparsity: 0.6\nmask_structure: '0:0'\ntargets: [Linear]\nignore: ['re:.*lm_head']",
         dict(sparsity=0.6, ignore=["re:.*lm_head"])),
        ("mask_file: m.npz\nskip_attention: false", dict(mask="given", mask_options={"masks": "m.npz"})),
        ("skip_attention: true\nignore: lm_head", dict(ignore=["lm_head", ATTENTION])),
    ],
)  # fmt: skip
def test_the_words_of_other_tools(tmp_path, text, arguments):
    assert dict(load_recipe(written(tmp_path, text))) == arguments


def staged(modifiers, stage="sparsity_stage", group="sparsity_modifiers"):
    return {stage: {group: modifiers}}


STAGE = """
model: M
sparsity_stage:
  run_type: oneshot
  sparsity_modifiers:
    SparseGPTModifier:
      sparsity: 0.5
      mask_structure: 2:4
      block_size: 64
      dampening_frac: 0.001
      sequential_update: true
      preserve_sparsity_mask: false
      sparsity_profile: null
      targets: ["Linear"]
      ignore: ["re:.*lm_head"]
"""


def test_a_stage_of_llm_compressor(tmp_path):
    expected = dict(mask="sparsegpt", pattern="2:4", mask_options={"block_size": 64}, damping=0.001, ignore=["re:.*lm_head"])
    recipe = load_recipe(written(tmp_path, STAGE))
    assert dict(recipe) == dict(model="M", **expected)
    recipe.save(tmp_path)  # in the plain form
    assert dict(load_recipe(tmp_path / "recipe.yaml")) == dict(recipe)
    owl = {"sparsity": 0.7, "sparsity_profile": "owl", "owl_m": 5, "owl_lmbda": 0.08, "mask_structure": "0:0"}
    assert dict(Recipe(staged({"WandaPruningModifier": owl}, "default_stage", "default_modifiers"))) == dict(
        mask="wanda", sparsity=0.7, allocation="owl", allocation_options={"threshold": 5, "lam": 0.08}
    )
    magnitude = {"init_sparsity": 0.0, "final_sparsity": 0.6, "start": 0, "end": 5, "update_scheduler": "cubic",
                 "mask_structure": "unstructured", "targets": "__ALL_PRUNABLE__"}  # fmt: skip
    assert dict(Recipe(staged({"MagnitudePruningModifier": magnitude}))) == dict(mask="magnitude", sparsity=0.6)
    assert dict(Recipe(staged({"WandaPruningModifier": None}))) == dict(mask="wanda")
    assert dict(Recipe({"model": "M", "WandaPruningModifier": {"sparsity": 0.4, "targets": ["__ALL__"]}})) == dict(
        model="M", mask="wanda", sparsity=0.4
    )
    assert command_recipe(written(tmp_path, STAGE), {"out": "O", "sparsity": 0.6})["sparsity"] == 0.6


GPTQ = {"GPTQModifier": {"scheme": "W4A16"}}


@pytest.mark.parametrize(
    ("recipe", "culprits"),
    [
        ({**staged({"WandaPruningModifier": {}}), **staged(GPTQ, "quant_stage")}, ("several stages (sparsity_stage, quant",)),
        (staged(GPTQ), ("modifier 'GPTQModifier'", "known: SparseGPTModifier, WandaPruningModifier, MagnitudePruningModifier")),
        (staged({"SparseGPTModifier": {}, **GPTQ}), ("modifier 'GPTQModifier'",)),
        (staged({"WandaModifier": {}}), ("modifier 'WandaModifier'", "known: SparseGPT")),
        (staged({"SparseGPTModifier": {}, "WandaPruningModifier": {}}), ("one pruning modifier", "SparseGPTModifier, WandaPru")),
        (staged({}), ("one pruning modifier, it has none",)),
        (staged({"SparseGPTModifier": {"preserve_sparsity_mask": True}}), ("preserve_sparsity_mask: True", "no counterpart")),
        (staged({"SparseGPTModifier": {"sparsty": 0.5}}), ("SparseGPTModifier has sparsty", "read are sparsity")),
        (staged({"SparseGPTModifier": {"mask_structure": "1:4"}}), ("mask_structure '1:4'", "kept or pruned")),
        (staged({"SparseGPTModifier": {"sparsity": [0.5, 0.6]}}), ("sparsity: [0.5, 0.6]",)),
        (staged({"MagnitudePruningModifier": {"sparsity": 0.5, "final_sparsity": 0.6}}), ("gives sparsity twice",)),
        ({**staged({"WandaPruningModifier": {"sparsity": 0.5}}), "sparsity": 0.6}, ("'sparsity' stands in sparsity_stage and",)),
        ({**staged({"WandaPruningModifier": {"sparsity": 0.5}}), "sparsity_ratio": 0.6}, ("'sparsity_ratio'", "same thing")),
        ({"sparsity_stage": {"run_type": "train"}}, ("sparsity_stage has 'run_type'",)),
        ({"sparsity_stage": 3}, ("sparsity_stage is a mapping, this is 3",)),
        (staged({"SparseGPTModifier": 0.5}), ("SparseGPTModifier is a mapping, this is 0.5",)),
    ],
)
def test_a_stage_that_asks_for_something_else_names_it(recipe, culprits):
    with pytest.raises(ValueError) as error:
        Recipe(recipe, "r.yaml")
    for culprit in (*culprits, "r.yaml"):
        assert culprit in str(error.value)


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
    assert cli.main(["prune", "--recipe", "recipe.yaml", "--seed", "3", "--device", "cpu", "--quiet", "--no-resume"]) == 0
    saved = load_recipe("out/recipe.yaml")
    defaults = {name: p.default for name, p in inspect.signature(prune_model).parameters.items()}
    assert saved["sparsity"] == 0.25 and saved["seed"] == 3 and saved["calibration"] == "calib.txt"
    assert "resume" not in saved  # which was about that run
    assert saved["damping"] == defaults["damping"] and saved["propagate"] == defaults["propagate"]
    first = stored(tmp_path / "out")
    assert cli.main(["prune", "--recipe", "out/recipe.yaml", "--quiet"]) == 0  # the saved one does the same again
    assert stored(tmp_path / "out") == first
    assert dict(load_recipe("out/recipe.yaml")) == dict(saved)
    assert cli.main(["prune", "--recipe", "none.yaml"]) == 2
    assert "no such recipe: none.yaml" in capsys.readouterr().err
