"""Recipes: one vocabulary, wrong keys named, other tools' words, and what YAML does to numbers."""

import dataclasses
import inspect
import subprocess
import sys

import pytest
import torch
from ruamel.yaml import YAML

from qprecon import cli
from qprecon.llm import prune_model
from qprecon.llm.settings.aliases import ALIASES, KEYS, SETTINGS, as_recipe, overridden
from qprecon.llm.settings.fields import options, type_hints
from qprecon.llm.settings.recipe import Recipe
from qprecon.llm.settings.recipe_file import checked, command_words, load_recipe, save_recipe, to_yaml
from qprecon.llm.settings.run import Run
from qprecon.llm.settings.targets import ATTENTION
from tests.llm.settings.options_table import shown, table
from tests.llm.toy_text import toy_llama, toy_tokenizer, words


def written(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_the_options_are_prune_models_keywords_and_aliases_point_at_them():
    parameters = inspect.signature(prune_model).parameters
    assert {*KEYS, "recipe", "tokenizer"} == set(parameters)
    assert set(ALIASES.values()) <= set(KEYS) and not set(ALIASES) & set(KEYS)
    for each, _ in options(Run):
        default = parameters[each.name].default
        assert default in (each.default, inspect.Parameter.empty) or (each.name, default) == ("progress", True)
    for each, option in options(Recipe):
        assert parameters[each.name].default == each.default
        assert f"    {each.name} ({each.type}" in prune_model.__doc__ and option.help in prune_model.__doc__


@pytest.mark.parametrize("of", [Recipe, Run])
def test_every_option_is_described(of):
    for each, option in options(of):
        assert option.help and option.group and each.type and each.name in type_hints(of)
        assert each.default is None or each.default in option.choices or not option.choices


def test_the_documentations_table_is_made_from_them():
    assert shown() == table(), "python -m tests.llm.settings.options_table"


def test_the_definition_loads_neither_torch_nor_transformers():
    code = "import sys; from qprecon.llm.settings import recipe; print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_recipe_is_frozen_plain_data():
    recipe = Recipe(pattern="2:4", dtype=torch.bfloat16, mask_options=None)
    assert recipe.dtype == "bfloat16" and recipe.mask_options == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.seed = 1
    assert Recipe(**recipe.settings()) == recipe and set(recipe.settings()) == set(SETTINGS)
    assert recipe.stated() == {"pattern": "2:4", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("recipe", "asked", "stated"),
    [
        (Recipe(), 0.5, False),
        (Recipe(sparsity=0.5), 0.5, True),
        (Recipe(sparsity="60%"), "60%", True),
        (Recipe(sparsity=0.5, pattern="2:4"), "2:4", True),
        (Recipe(pattern={"mlp": 0.3}), {"mlp": 0.3}, True),
    ],
)
def test_what_is_asked_of_the_layers(recipe, asked, stated):
    assert (recipe.amount, recipe.amount_stated) == (asked, stated)


@pytest.mark.parametrize(
    ("settings", "culprits"),
    [
        (dict(nsamples="128"), ("nsamples", "whole number", "'128'")),
        (dict(nsamples=0), ("nsamples", "at least 1", "0")),
        (dict(seqlen=1), ("seqlen", "at least 2")),
        (dict(damping=-0.1), ("damping", "at least 0")),
        (dict(damping=float("nan")), ("damping", "nan")),
        (dict(damping=10**400), ("damping must be a finite number",)),
        (dict(update="optmal"), ("update", "'optmal'", "did you mean 'optimal'?")),
        (dict(update="adam"), ("update", "backend='adam'")),
        (dict(propagate="sparse"), ("propagate", "pruned, dense")),
        (dict(allocation="even"), ("allocation", "'even'")),
        (dict(mask=3), ("mask", "3")),
        (dict(dtype=3), ("dtype", "3")),
        (dict(sparsity=0.6, pattern="2:4"), ("0.6", "'2:4'")),
        (dict(sparsity="0,5"), ("0,5",)),
        (dict(pattern={"mlp": "3:2"}), ("3:2",)),
        (dict(pattern={}), ("pattern", "{}")),
        (dict(pattern={"mlp": "2:4", "attn": None}), ("'attn'", "None")),
        (dict(pattern={"mlp": "2:4", "attn": "1:4"}, sparsity=0.5), ("0.5", "1:4")),
        (dict(pattern={"mlp": "2:4"}, sparsity=1.0), ("sparsity",)),
        (dict(mask_options=["a"]), ("mask_options",)),
    ],
)
def test_bad_settings_are_named(settings, culprits):
    with pytest.raises(ValueError) as error:
        Recipe(**settings)
    for culprit in culprits:
        assert culprit in str(error.value)


def test_keywords_go_before_a_recipe():
    base = Recipe(pattern="2:4", mask="thanos", mask_options={"a": 1, "b": 2}, seed=3)
    assert as_recipe(base, {}) == base and as_recipe(None, {}) == Recipe()
    assert as_recipe({"sparsity": 0.6}, {"seed": 1}) == Recipe(sparsity=0.6, seed=1)
    changed = as_recipe(base, {"sparsity": 0.6, "mask_options": {"b": 3}})
    assert changed == Recipe(sparsity=0.6, mask="thanos", mask_options={"a": 1, "b": 3}, seed=3)
    assert as_recipe(base, {"mask": "wanda"}).mask_options == {}  # those of another mask
    assert as_recipe(base, {"seed": 0}).seed == 0
    with pytest.raises(TypeError, match="'sparsty'; did you mean 'sparsity'"):
        as_recipe(base, {"sparsty": 0.5})
    with pytest.raises(TypeError, match="'sparsity_ratio'; here that is 'sparsity'"):
        as_recipe(None, {"sparsity_ratio": 0.5})
    with pytest.raises(TypeError, match="recipe: a Recipe or a mapping"):
        as_recipe("recipe.yaml", {})


def read_as_1_1(text):
    """As most readers in use do."""
    reader = YAML(typ="safe", pure=True)
    reader.version = (1, 1)
    return reader.load(text)


def test_yaml_1_1_does_not_spoil_patterns_and_numbers(tmp_path):
    path = written(tmp_path, "pattern: 2:4\ntol: 1e-6\nmask: no\nnsamples: 12\nignore: [re:.*3$, lm_head]\n")
    assert read_as_1_1("pattern: 2:4")["pattern"] == 124  # what would have been asked for
    assert dict(load_recipe(path)) == dict(
        pattern="2:4", tol=1e-6, mask="no", nsamples=12, ignore=["re:.*3$", "lm_head"]
    )


def test_a_recipe_reads_back_as_it_was_written(tmp_path):
    words = dict(model="1e5", out="no", pattern={"q_proj": "2:4", "re:.*": 0.5}, tol=1e-7, seed=3, targets=["123", "ä: #1\n"])
    assert dict(load_recipe(written(tmp_path, to_yaml(words)))) == words
    assert read_as_1_1(to_yaml({**words, "tol": 0.5})) == {**words, "tol": 0.5}  # its numbers have a point
    (tmp_path / "recipe.yaml").unlink()
    save_recipe({**words, "resume": False, "progress": "json"}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
    saved = load_recipe(tmp_path / "recipe.yaml")
    assert saved.items() >= words.items() and not {"resume", "progress", "sparsity"} & set(saved)
    assert Recipe(**{key: saved[key] for key in saved if key in SETTINGS}).stated() == {
        key: words[key] for key in words if key in SETTINGS
    }
    assert load_recipe(save_recipe({"mask": "wanda"}, tmp_path))["sparsity"] == 0.5
    assert "sparsity" not in load_recipe(save_recipe({"mask": "given"}, tmp_path))


@pytest.mark.parametrize(
    ("text", "culprits"),
    [
        ("sparsty: 0.5", ("'sparsty'", "did you mean 'sparsity'?")),
        ("prune-method: wanda", ("'prune-method'", "here that is 'mask'")),
        ("wbits: 4", ("'wbits'", "here that is 'quantize': int4 for 4 bits")),
        ("save: out", ("'save'", "here that is 'out'")),
        ("eval_zero_shot: true", ("'eval_zero_shot'", "qprecon eval")),
        ("nsampels: 4", ("did you mean 'nsamples'?",)),
        ("tokenizer: x", ("unknown key 'tokenizer'",)),
        ("wibble: 1", ("'wibble'", "known: model, out, calibration")),
        ("nsamples: '128'", ("nsamples", "'128'", "whole number")),
        ("nsamples: 1.5", ("nsamples", "1.5", "whole number")),
        ("damping: much", ("damping", "'much'", "number")),
        ("targets: 3", ("targets", "3", "text")),
        ("save_masks: 1", ("save_masks", "True or False")),
        ("model: 3", ("model", "text", "3")),
        ("progress: loud", ("progress", "bar, json, quiet", "'loud'")),
        ("update: adam", ("backend='adam'",)),
        ("seed: 1\nseed: 2", ("not YAML", 'duplicate key "seed"', "line 2")),
        ("mask_options: {a: 1, a: 2}", ("not YAML", "duplicate key")),
        ("out: 2026-01-31", ("out", "text", "2026, 1, 31")),
        ("seed: 1\n---\nseed: 2", ("not YAML", "another document")),
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
        load_recipe(written(tmp_path, text))
    for culprit in culprits:
        assert culprit in str(error.value)
    assert "recipe.yaml" in str(error.value)


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
        ("order: yes\nresume: Off", dict(order=True, resume=False)),
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
    assert load_recipe(save_recipe(recipe, tmp_path)).items() >= recipe.items()  # in the plain form
    owl = {"sparsity": 0.7, "sparsity_profile": "owl", "owl_m": 5, "owl_lmbda": 0.08, "mask_structure": "0:0"}
    assert dict(checked(staged({"WandaPruningModifier": owl}, "default_stage", "default_modifiers"))) == dict(
        mask="wanda", sparsity=0.7, allocation="owl", allocation_options={"threshold": 5, "lam": 0.08}
    )
    magnitude = {"init_sparsity": 0.0, "final_sparsity": 0.6, "start": 0, "end": 5, "update_scheduler": "cubic",
                 "mask_structure": "unstructured", "targets": "__ALL_PRUNABLE__"}  # fmt: skip
    assert dict(checked(staged({"MagnitudePruningModifier": magnitude}))) == dict(mask="magnitude", sparsity=0.6)
    assert dict(checked(staged({"WandaPruningModifier": None}))) == dict(mask="wanda")
    assert dict(checked({"model": "M", "WandaPruningModifier": {"sparsity": 0.4, "targets": ["__ALL__"]}})) == dict(
        model="M", mask="wanda", sparsity=0.4
    )
    assert command_words(written(tmp_path, STAGE), {"out": "O", "sparsity": 0.6})["sparsity"] == 0.6


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
        (staged({"SparseGPTModifier": {"sparsity": [0.5, 0.6]}}), ("sparsity", "[0.5, 0.6]")),
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
        checked(recipe, "r.yaml")
    for culprit in (*culprits, "r.yaml"):
        assert culprit in str(error.value)


def test_flags_go_before_the_recipe(tmp_path):
    path = written(tmp_path, "model: M\nout: O\npattern: 2:4\nseed: 3\n")
    assert dict(command_words(path, {"sparsity": 0.7, "seed": 4})) == dict(
        model="M", out="O", sparsity=0.7, seed=4, calibration="c4", device="auto"
    )
    assert command_words(path, {"pattern": "4:8"})["pattern"] == "4:8"
    path = written(tmp_path, "model: M\nout: O\nignore: c\nallocation: owl\nallocation_options: {lam: 0.1}")
    assert command_words(path, {"skip_attention": True})["ignore"] == ["c", ATTENTION]
    assert command_words(path, {"skip_attention": True, "ignore": ["d"]})["ignore"] == ["d", ATTENTION]
    assert command_words(path, {"allocation_options": {"threshold": 3}})["allocation_options"] == {"lam": 0.1, "threshold": 3}
    assert "allocation_options" not in command_words(path, {"allocation": "uniform"})
    assert overridden({"pattern": "2:4"}, {"sparsity": 0.5}) == {"sparsity": 0.5}
    with pytest.raises(ValueError, match="MODEL is missing"):
        command_words(None, {})


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
    defaults = Recipe().settings()
    assert saved["sparsity"] == 0.25 and saved["seed"] == 3 and saved["calibration"] == "calib.txt"
    assert "resume" not in saved  # which was about that run
    assert saved["damping"] == defaults["damping"] and saved["propagate"] == defaults["propagate"]
    first = stored(tmp_path / "out")
    assert cli.main(["prune", "--recipe", "out/recipe.yaml", "--quiet"]) == 0  # the saved one does the same again
    assert stored(tmp_path / "out") == first
    assert dict(load_recipe("out/recipe.yaml")) == dict(saved)
    assert cli.main(["prune", "--recipe", "none.yaml"]) == 2
    assert "no such recipe: none.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "said"), [
    ("a: &a0 [1, 1]\n" + "".join(f"b{i}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(30)), "100,000 values"),
    ("targets: &t [*t]", "the alias \\*t stands within what it names"), ("mask_options: " + "[" * 1000, "in one another"),
    ("targets: !!binary aGVsbG8=", "targets: a pattern is a non-empty string"), ("ignore: [3]", "ignore: a pattern"),
])  # fmt: skip
def test_yaml_that_is_made_to_break_its_reader(tmp_path, text, said):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        load_recipe(tmp_path / "recipe.yaml")
    assert "recipe.yaml" in str(caught.value)


def test_aliases_are_taken(tmp_path):
    (tmp_path / "recipe.yaml").write_text("targets: &mlp ['re:.*mlp.*']\nignore: *mlp")
    assert load_recipe(tmp_path / "recipe.yaml")["ignore"] == ["re:.*mlp.*"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ({"pattern": 10**400}, "pattern"), ({"sparsity": "1e999999999"}, "sparsity"), ({"sparsity": 1}, "sparsity"),
        ({"pattern": "0:4"}, "pattern"), ({"pattern": {"*": 0.5, "threshold": 7}}, "'threshold'"),
        ({"pattern": {"*": "100%"}}, "'*'"), ({"mask_structure": 10**400}, "mask_structure"),
        ({"sparsity_type": "x"}, "sparsity_type"),
        ({"ignore": 10**400, "skip_attention": True}, "ignore"), ({"ignore": 1}, "ignore"), ({"targets": True}, "targets"),
    ],
)  # fmt: skip
def test_what_is_no_pattern_is_named_by_its_word(words, named):
    with pytest.raises(ValueError, match="recipe: ") as refusal:
        checked(words)
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    "words", [{"mask_file": 7}, {"mask_file": " "}, {"mask_file": True}, {"mask_file": [[]]}, {"mask_file": "a", "mask": "wanda"},
              {"mask_file": "a", "prune_method": "wanda"}],
)  # fmt: skip
def test_what_is_wrong_about_mask_file_names_it(words):
    with pytest.raises(ValueError, match="mask_file"):
        checked(words)


def test_mask_file_goes_with_mask_given():
    for more in ({}, {"mask": "given"}, {"prune_method": "given"}):
        assert checked({"mask_file": "a", **more}) == {"mask": "given", "mask_options": {"masks": "a"}}


@pytest.mark.parametrize("settings, said", [
    ({}, []),
    ({"rounding": "sweep", "preset": "fast"}, []),  # what the preset has anyway, as in a recipe that was written out
    ({"rounding": "gptq"}, ["rounding: no effect without quantize"]),
    ({"rounding_options": {"refits": 7}, "mask": "wanda"}, ["rounding_options: no effect without quantize"]),
    ({"rounding": "gptq", "quantize": "int4"}, []),
    ({"refine_options": {"passes": 4}}, ["refine_options: no effect without refine"]),
    ({"refine": "block", "refine_options": {"passes": 4}}, []),
    ({"update": "none", "solve_options": {"foo": 1}}, ["solve_options: no effect with update='none', which solves nothing"]),
    ({"update": "none", "tol": 1e-6, "rounding": "nearest"}, [
        "tol: no effect with update='none', which solves nothing", "rounding: no effect without quantize",
    ]),
])  # fmt: skip
def test_what_has_no_effect_is_said(settings, said):
    assert Recipe(**settings).without_effect() == said
