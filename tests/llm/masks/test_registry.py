"""Mask selectors of third parties: the guide's works, none replaces another, a broken one is an error only for who asks for it."""

import re
from pathlib import Path

import pytest
import torch

from qprecon import cli
from qprecon.errors import PluginBrokenError
from qprecon.llm import prune_model
from qprecon.llm.masks import ENTRY_POINT_GROUP, SELECTORS, LayerData, get_selector, selectors
from qprecon.llm.masks.patterns import Pattern
from qprecon.llm.settings.beforehand import check_recipe
from qprecon.llm.settings.recipe import Recipe
from tests.llm.families import build, tokens

GUIDE = Path(__file__).parents[3] / "docs" / "extending" / "adding_a_mask.md"
RECORD = "from qprecon.llm.masks import Selector\nRECORD = Selector({0!r}, {0!r}, False, False, 'a test')\n"


def block(language):
    return re.search(rf"```{language}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL).group(1)


@pytest.fixture
def guide(install):
    group, name, value = re.search(r'entry-points\."(.+?)"\]\n(\w+) = "(.+?)"', block("toml")).groups()
    assert group == ENTRY_POINT_GROUP
    install(value.partition(":")[0], block("python"), f"{name} = {value}", group=group)
    return name


def test_the_guides_selector_is_wandas_with_an_option(guide):
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    layer = LayerData("x", torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), x.T @ x, 50)
    for pattern in (Pattern.parse("50%"), Pattern.parse("2:4")):
        wanda, mine = get_selector("wanda"), get_selector(guide)
        assert torch.equal(mine.select(layer, pattern).mask_NK, wanda.select(layer, pattern).mask_NK)
        magnitude = get_selector("magnitude").select(layer, pattern)
        assert torch.equal(mine.select(layer, pattern, power=0).mask_NK, magnitude.mask_NK)
    assert selectors().keys() - SELECTORS.keys() == {guide}


def test_prune_model_takes_it_and_checks_its_options(guide):
    mine, wanda = build("llama"), build("llama")
    report = prune_model(mine, tokens(2), mask=guide, update="none", progress=False)
    prune_model(wanda, tokens(2), mask="wanda", update="none", progress=False)
    assert report.settings["mask"] == guide
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), wanda.parameters(), strict=True))
    for options, message in (({"pwer": 1}, "'pwer'; did you mean 'power'"), ({"power": "x"}, "power must be a number, got 'x'")):
        with pytest.raises(ValueError, match=f"mask {guide!r}.*{message}"):
            prune_model(mine, tokens(2), mask=guide, mask_options=options, progress=False)
    with pytest.raises(ValueError, match="power must not be negative"):
        prune_model(mine, tokens(2), mask=guide, mask_options={"power": -1}, progress=False)


@pytest.mark.parametrize("name", ["wanda", "twice"])
def test_duplicates_are_refused(install, name):
    install("one", RECORD.format(name), f"{name} = one:RECORD", "first", ENTRY_POINT_GROUP)
    if name == "twice":
        install("two", RECORD.format(name), f"{name} = two:RECORD", "second", ENTRY_POINT_GROUP)
        with pytest.raises(ValueError, match="twice.*exists already"):
            get_selector("twice")
    install("fine", RECORD.format("fine"), "fine = fine:RECORD", "another", ENTRY_POINT_GROUP)
    assert get_selector("fine").name == "fine" and set(selectors()) == {*SELECTORS, "fine"}  # stopped by nobody
    assert get_selector("wanda") is SELECTORS["wanda"]  # never replaced


def test_a_broken_one_is_an_error_only_for_who_asks_for_it(install):
    install("shattered", "1 / 0\n", "shattered = shattered:RECORD", "first", ENTRY_POINT_GROUP)
    install("odd", "RECORD = 3\n", "odd = odd:RECORD", "second", ENTRY_POINT_GROUP)
    install("hollow", RECORD.format("hollow").replace("'hollow', False", "'no_such_module', False"), "hollow = hollow:RECORD",
            "third", ENTRY_POINT_GROUP)  # fmt: skip
    assert get_selector("alps").name == "alps"
    for name, culprit in (("shattered", "ZeroDivisionError"), ("odd", "not a qprecon Selector")):
        with pytest.raises(PluginBrokenError, match=f"{name}.*{culprit}"):
            get_selector(name)
    assert set(selectors()) == {*SELECTORS, "hollow"}  # what can be loaded, as `backends()`; hollow's module is not looked for yet
    with pytest.raises(PluginBrokenError, match="hollow.*no_such_module"):
        prune_model(build("llama"), tokens(2), mask="hollow", progress=False)
    with pytest.raises(ValueError, match="unknown mask 'hollo'; did you mean 'hollow'"):
        get_selector("hollo")


TAKES = """
from dataclasses import dataclass
from qprecon.llm.masks import Selector
{options}
RECORD = Selector("faulty", "faulty_mask", False, False, "a test", takes={takes})
"""
FRAGILE = """
@dataclass(frozen=True)
class Options:
    power: int{default}
    def __post_init__(self):
        {made}
    def check_pattern(self, pattern):
        {checked}
"""


@pytest.mark.parametrize(
    "options, takes, said",
    [
        ("", "dict", "its options should be a dataclass, not <class 'dict'>"),
        ("", "'Options'", "its options should be a dataclass, not 'Options'"),
        (FRAGILE.format(default="=1", made="1 / 0", checked="pass"), "Options", "its options cannot be made: ZeroDivisionError"),
        (FRAGILE.format(default="=1", made="pass", checked="1 / 0"), "Options", "failed: ZeroDivisionError"),
        (FRAGILE.format(default="=1", made="pass", checked="pass"), "Options()", "its options should be a dataclass, not Options"),
    ],
)
def test_options_that_are_broken_are_the_masks_fault(install, capsys, tmp_path, options, takes, said):
    install("faulty_mask", TAKES.format(options=options, takes=takes), "faulty = faulty_mask:RECORD", group=ENTRY_POINT_GROUP)
    with pytest.raises(PluginBrokenError, match=f"^mask 'faulty':? {said}"):
        check_recipe(Recipe(mask="faulty", sparsity=0.5))
    assert cli.main(["prune", str(tmp_path / "M"), str(tmp_path / "O"), "--calib", "builtin", "--mask", "faulty"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "mask 'faulty'" in line and said in line


def test_an_option_that_a_mask_needs_is_named(install):
    options = FRAGILE.format(default="", made="pass", checked="pass")
    install("faulty_mask", TAKES.format(options=options, takes="Options"), "faulty = faulty_mask:RECORD", group=ENTRY_POINT_GROUP)
    with pytest.raises(ValueError, match="^mask 'faulty' needs its option 'power'$"):
        check_recipe(Recipe(mask="faulty", sparsity=0.5))
    check_recipe(Recipe(mask="faulty", sparsity=0.5, mask_options={"power": 2}))


def test_options_of_its_module_are_looked_at_too(install):
    source = RECORD.format("faulty") + "Options = {'power': 1}\ndef select(layer, pattern, options): pass\n"
    install("faulty", source, "faulty = faulty:RECORD", group=ENTRY_POINT_GROUP)
    with pytest.raises(PluginBrokenError, match="mask 'faulty': its options should be a dataclass"):
        prune_model(build("llama"), tokens(2), mask="faulty", progress=False)


@pytest.mark.parametrize("module", ["no_such_module", "hollow.inside", "qprecon.llm.no_such_module"])
def test_a_module_that_is_missing_is_told_beforehand(install, module):
    record = RECORD.format("hollow").replace("'hollow', False", f"'{module}', False")
    install("hollow", record, "hollow = hollow:RECORD", group=ENTRY_POINT_GROUP)
    with pytest.raises(PluginBrokenError, match=f"mask 'hollow' is installed, but there is no module '{module}'"):
        check_recipe(Recipe(mask="hollow", sparsity=0.5))


def test_no_package_is_imported_to_look_for_a_module(install, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    record = RECORD.format("deep").replace("'deep', False", "'package.inside', False")
    install("deep", record, "deep = deep:RECORD", group=ENTRY_POINT_GROUP)
    check_recipe(Recipe(mask="deep", sparsity=0.5))
