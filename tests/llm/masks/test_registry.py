"""Mask selectors of third parties: the guide's works, none replaces another, a broken one is an error only for who asks for it."""

import re
from pathlib import Path

import pytest
import torch

from qprecon.errors import PluginBrokenError
from qprecon.llm import prune_model
from qprecon.llm.masks import ENTRY_POINT_GROUP, SELECTORS, LayerData, get_selector, selectors
from qprecon.llm.masks.patterns import Pattern
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
