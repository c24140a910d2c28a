"""Presets: what they set, what goes before them, and what they give way to."""

import pytest

from qprecon.grids.on_grid import Effort
from qprecon.llm import prune_model
from qprecon.llm.settings.aliases import as_recipe
from qprecon.llm.settings.presets import PRESETS
from qprecon.llm.settings.recipe import Recipe
from tests.llm.families import build, tokens

FAST = {"mask": "wanda", "allocation": "uniform", "order": False, "refine": "none"}
SHARES = ("drift", "residual", "token_weights", "output_weights")


def test_the_values_are_those_that_the_documentation_gives():
    """docs/llm/pruning.md (presets) and docs/llm/low_bit.md (efforts)."""
    recipes = {name: Recipe(preset=name) for name in ("fast", "balanced", "best")}
    assert {key: getattr(recipes["fast"], key) for key in FAST} == FAST
    assert [getattr(recipes["fast"], name) for name in SHARES] == [0.0] * 4
    for name, mask in (("balanced", "wanda"), ("best", "alps")):
        expected = FAST | {"mask": mask, "allocation": "loss", "order": True}
        assert {key: getattr(recipes[name], key) for key in FAST} == expected
        assert [getattr(recipes[name], share) for share in SHARES] == [0.5] * 4
    efforts = {name: Effort(recipe.rounding, **recipe.rounding_options) for name, recipe in recipes.items()}
    found = {name: (effort.method, effort.sweeps, effort.refits, effort.repeats) for name, effort in efforts.items()}
    assert found == {"fast": ("sweep", 1, 0, 0), "balanced": ("sweep", 2, 2, 1), "best": ("sweep", 2, 4, 2)}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_is_not_asked_for(name):
    recipe = Recipe(preset=name)
    assert all(getattr(recipe, key) == value for key, value in PRESETS[name].items())
    assert recipe.stated() == ({} if name == "balanced" else {"preset": name})
    other = Recipe(preset=name, mask="sparsegpt", drift=0.0, token_weights=1.0, order=False)
    assert (other.mask, other.drift, other.token_weights, other.order) == ("sparsegpt", 0.0, 1.0, False)
    assert Recipe(**other.stated()) == other and as_recipe(other, {}) == other
    assert Recipe(**recipe.complete()).settings() == recipe.complete()


def test_the_preset_where_none_is_asked_for():
    """Weights that are solved for get what pays; a published method's own weights are that method, and nothing more."""
    assert Recipe() == Recipe(preset="balanced") and Recipe().order and Recipe().allocation == "loss"
    for update in ("none", "own"):
        recipe = Recipe(update=update)
        assert recipe.preset == "fast" and recipe.stated() == {"update": update}
        assert (recipe.order, recipe.drift, recipe.mask, recipe.allocation) == (False, 0, "wanda", "uniform")
        assert as_recipe(recipe, {"update": "optimal"}) == Recipe()
        assert Recipe(update=update, preset="balanced").order and Recipe(update=update, preset="balanced").token_weights == 0.5
    assert as_recipe(Recipe(preset="fast"), {"update": "none"}).preset == "fast"


def test_a_preset_gives_way():
    assert not Recipe(preset="best", propagate="dense").order and Recipe(preset="best", propagate="dense").drift == 0
    assert Recipe(preset="best", update="none").drift == 0 and Recipe(preset="best", update="none").order
    assert Recipe(preset="best", damping=0.0).drift == 0
    for amount in ({"pattern": "2:4"}, {"pattern": {"*": 0.5}}, {"mask": "given"}):
        assert Recipe(preset="best", **amount).allocation == "uniform"


def test_a_preset_prunes_nothing_quickly():
    for amount in ({"sparsity": 0}, {"sparsity": "0%"}, {"pattern": 0.0}):
        recipe = Recipe(preset="best", quantize="int4", **amount)
        assert (recipe.mask, recipe.allocation, recipe.order) == ("wanda", "uniform", True)
        assert Recipe(preset="best", mask="alps", **amount).mask == "alps"
    assert Recipe(preset="best", quantize="int4", rounding="gptq").rounding_options == {}
    assert Recipe(preset="best", quantize="int4").rounding_options == PRESETS["best"]["rounding_options"]


def test_what_is_asked_for_beside_a_preset_is_kept_when_the_preset_changes():
    first = as_recipe({"preset": "balanced", "drift": 0.25}, {})
    assert as_recipe(first, {"preset": "best"}).drift == 0.25
    assert as_recipe(first, {"preset": "best"}).mask == PRESETS["best"]["mask"]
    assert as_recipe(first, {"drift": 0.0}).drift == 0.0
    with pytest.raises(ValueError, match="preset must be one of .*did you mean 'best'"):
        Recipe(preset="bets")


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("amount", [{"sparsity": 0.5}, {"pattern": "2:4"}, {"sparsity": 0.6}])
def test_a_run_with_a_preset_is_one_with_what_it_stands_for(name, amount):
    model, other = build("llama"), build("llama")
    report = prune_model(model, tokens(6), preset=name, progress=False, **amount)
    settings = {key: getattr(Recipe(preset=name, **amount), key) for key in (*PRESETS[name], "mask_options", "allocation_options")}
    prune_model(other, tokens(6), progress=False, **amount, **settings)
    assert report.settings["preset"] == name and report.settings["drift"] == settings["drift"]
    assert all((a == b).all() for a, b in zip(model.parameters(), other.parameters(), strict=True))
