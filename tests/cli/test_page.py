"""The HTML page: complete, self-contained, escaped, and readable at both widths in a real browser."""

import functools
import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import jinja2
import pydantic
import pytest

from qprecon import cli
from qprecon.llm import prune_model, recover
from qprecon.llm.evaluation import assessment
from qprecon.llm.settings import recipe_file
from qprecon.llm.storage import output
from qprecon.page import runs, write_page
from qprecon.page.charts import _linear_scale, _log_scale
from tests.llm.families import build, tokens

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VOID = {"meta", "br", "path", "line", "rect", "circle", "polyline"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An optimal and a mask-only run of a toy model, the first with an evaluation, a recipe and a hostile name."""
    home = tmp_path_factory.mktemp("runs")
    for name, update in (("a<b&c", "optimal"), ("plain", "none")):
        model = build("llama")
        model.config._name_or_path = "toy<script>alert(1)</script>"
        prune_model(model, tokens(4), out=home / name, update=update, backend="cholesky", progress=False)
    scores = [
        {"task": name, "source": "hub", "limit": None, "items": 10, "acc": 0.5, "acc_stderr": 0.1, "acc_norm": None,
         "acc_norm_stderr": None, "perplexity": None} for name in ("mmlu", "piqa", "arc_easy", "arc_challenge", "winogrande")
    ]  # fmt: skip
    scores.append({**scores[0], "task": "openbookqa", "acc": 0.2})
    perplexities = [{"value": 41.25, "text": "wiki", "seqlen": 512, "windows": 4, "bos": "none"}]
    saved = {"format": 1, "perplexity": perplexities, "tasks": scores}
    (home / "a<b&c" / assessment.EVALUATION_NAME).write_text(json.dumps(saved))
    (home / "a<b&c" / recipe_file.RECIPE_NAME).write_text("mask: wanda\n")
    return [home / "a<b&c", home / "plain"]


class Checker(HTMLParser):
    """Tags that match, text, and everything that could reach the network or run."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.tags, self.links = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href") or name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_names_are_those_that_the_rest_writes():
    assert (runs.REPORT_NAME, runs.EVALUATION_NAME, runs.RECIPE_NAME) == (
        output.REPORT_NAME, assessment.EVALUATION_NAME, recipe_file.RECIPE_NAME,
    )  # fmt: skip


def test_a_page_is_self_contained_and_says_everything(folders):
    path = write_page(folders[:1])
    assert path == folders[0] / "report.html"
    text = path.read_text()
    page = Checker(text)
    assert "script" not in page.tags and page.links == [] and "url(" not in text and "@import" not in text
    assert "prefers-color-scheme:dark" in text and "width=device-width" in text
    shown = " ".join(page.text)
    assert "toy<script>alert(1)</script>" in shown  # as text
    report = json.loads((folders[0] / output.REPORT_NAME).read_text())
    for row in report["layers"]:
        assert row["name"] in shown and f"{row['error_stored']:.4g}" in shown
    marks = re.findall(r"<title>([^<]*?): as stored ([\d.e-]+)</title>", text)
    assert [name for name, _ in marks] == [row["name"] for row in report["layers"]]
    assert [float(value) for _, value in marks] == [float(f"{row['error_stored']:.4g}") for row in report["layers"]]
    for part in ("41.25", "perplexity, wiki, windows of 512", "average of six", "45.00%", "mask: wanda", "asked for: 0.0001"):
        assert part in shown
    assert 'class="warn"' not in text
    for phase in report["phase_seconds"]:
        assert phase in shown


def test_a_page_says_whose_shares_were_asked_for(folders, tmp_path):
    """Where the sparsity is allotted, that of a layer is not the user's."""
    report = json.loads((folders[0] / output.REPORT_NAME).read_text())
    for allocation in ("uniform", "loss"):
        report["settings"]["allocation"] = allocation
        (tmp_path / output.REPORT_NAME).write_text(json.dumps(report))
        assert ("allocation=loss gave it" in write_page([tmp_path]).read_text()) == (allocation == "loss")


def test_warnings_are_shown(folders, tmp_path):
    report = json.loads((folders[0] / output.REPORT_NAME).read_text())
    report["warnings"] = ["1 experts got no token"]
    report["layers"][1] |= {"uncertified": 2, "relative_gap": None, "note": "magnitude mask", "fallbacks": 3}
    report["layers"][2] |= {"relative_gap": 0.0, "error_stored": 0.0}
    report["layers"][3]["error_masked"] = None  # an overflow
    (tmp_path / output.REPORT_NAME).write_text(json.dumps(report))
    shown = " ".join(Checker(write_page([tmp_path]).read_text()).text)
    parts = ("1 experts got no token", "3 columns kept the start", "2 of", "without any certificate", "magnitude mask")
    for part in (*parts, "unbounded", "stored dense"):
        assert part in shown
    report["settings"] |= {"quantize": "int4"}
    for row in report["layers"]:
        row["bits"] = 4.25
    (tmp_path / output.REPORT_NAME).write_text(json.dumps(report))
    shown = " ".join(Checker(write_page([tmp_path]).read_text()).text)
    assert "int4 in compressed-tensors files, 4.25 bits" in shown and "stored dense" not in shown


def leaves(data, path=()):
    """The path to every value of nested dicts and lists, and, ending in None, to every key."""
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from leaves(value, (*path, key))
            yield from [(*path, key, None)] if isinstance(data, dict) else []
    else:
        yield path


def replaced(data, path, value):
    """A copy in which `value` stands at the path, or is the key."""
    data = json.loads(json.dumps(data))
    *parents, last = path if path[-1] is not None else path[:-1]
    inner = data
    for key in parents:
        inner = inner[key]
    if path[-1] is None:
        inner[value] = inner[last]
    else:
        inner[last] = value
    return data


@pytest.fixture
def compiled_once(monkeypatch):
    """Templates and readers of JSON, which each page makes anew: a test that writes hundreds of pages makes them once."""
    made, own = [], jinja2.Environment

    def environment(**given):
        if not made:
            made.append(own(**given))
        return made[0]

    monkeypatch.setattr(jinja2, "Environment", environment)
    monkeypatch.setattr(pydantic, "TypeAdapter", functools.cache(pydantic.TypeAdapter))


def test_no_field_of_a_report_gets_into_the_page_as_markup(folders, tmp_path, compiled_once):
    """Each is shown as text, or refused by name where it ought to be a number."""
    hostile = "</title><script>alert(1)</script>'\""
    files = {name: json.loads((folders[0] / name).read_text()) for name in (output.REPORT_NAME, assessment.EVALUATION_NAME)}
    report, evaluation = files.values()
    report |= {"layers": report["layers"][:2], "warnings": ["a"], "excluded": [["b", "c"]]}
    evaluation["tasks"] = evaluation["tasks"][:1]
    (tmp_path / recipe_file.RECIPE_NAME).write_text(hostile)
    shown = 0
    for name, data in files.items():
        for path in leaves(data):
            for other in files:
                (tmp_path / other).write_text(json.dumps(replaced(data, path, hostile) if other == name else files[other]))
            try:
                text = write_page([tmp_path, tmp_path]).read_text()
            except ValueError as error:
                assert str(tmp_path) in str(error), path
                continue
            shown += text.count("&lt;script&gt;alert(1)") > 2  # the recipe's, of both runs
            assert "<script" not in text and "\"'\"" not in text, path
    assert shown > 50


def test_several_runs_are_compared(folders, tmp_path, capsys):
    target = tmp_path / "deep" / "both.html"
    assert cli.main(["report", *map(str, folders), "-o", str(target)]) == 0
    assert capsys.readouterr().out.strip() == str(target)
    text = target.read_text()
    page = Checker(text)
    assert page.tags.count("h2") == 3 and "a<b&c" in page.text and "plain" in page.text
    assert "of different measures" in text and text.count("Not to be compared with errors") == 1  # balanced beside fast
    assert "of different measures" not in write_page([folders[1], folders[1]], target).read_text()
    table = text[text.index('class="runs"') : text.index("</table>")]
    assert re.findall(r"<td[^>]*>(.*?)</td>", table.split("update</td>")[1])[:2] == ["optimal", "none"]
    assert re.findall(r"<td[^>]*>(.*?)</td>", table.split("BOS none)</td>")[1])[:2] == ["41.25", "–"]
    cells = {name: re.findall(r"<td[^>]*>(.*?)</td>", table.split(f"{name}</td>")[1])[:2] for name in ("preset", "calibration")}
    assert cells == {"preset": ["balanced", "fast"], "calibration": ["tokens (4, 32), 4 × 32"] * 2}
    assert "rank of the adapter" not in table
    other = json.loads((folders[1] / output.REPORT_NAME).read_text())
    other["settings"] |= {"quantize": "int4", "adapter_rank": 8, "calibration": "a.txt"}
    other["layers"] = [row | {"bits": 4.25} for row in other["layers"]]
    (tmp_path / output.REPORT_NAME).write_text(json.dumps(other))
    text = write_page([folders[0], tmp_path], target).read_text()
    table = text[text.index('class="runs"') : text.index("</table>")]
    wanted = {"stored in": ["dense", "int4, 4.25 bits"], "rank of the adapter": ["–", "8"]}
    wanted["calibration"] = ["tokens (4, 32), 4 × 32", "a.txt, 4 × 32"]
    for name, expected in wanted.items():
        assert re.findall(r"<td[^>]*>(.*?)</td>", table.split(f"{name}</td>")[1])[:2] == expected
    other["layers"] = other["layers"][:3]
    (tmp_path / output.REPORT_NAME).write_text(json.dumps(other))
    assert "different layers" in write_page([folders[0], tmp_path], target).read_text()


def test_ranks_and_a_tasks_perplexity_are_shown(folders, tmp_path):
    report = json.loads((folders[1] / output.REPORT_NAME).read_text()) | {"world_size": 3}
    (tmp_path / output.REPORT_NAME).write_text(json.dumps(report))
    task = {"source": "hub", "limit": None, "items": 10, "acc": 0.5, "acc_stderr": 0.1, "acc_norm": None, "acc_norm_stderr": None}
    tasks = [task | {"task": "lambada_openai", "perplexity": 12.345}, task | {"task": "piqa", "perplexity": None}]
    (tmp_path / "qprecon_eval.json").write_text(json.dumps({"format": 1, "perplexity": [], "tasks": tasks}))
    text = write_page([tmp_path], tmp_path / "page.html").read_text()
    assert "processes (ranks) 3" in " ".join(" ".join(Checker(text).text).split())
    rows = dict(re.findall(r"<tr><td[^>]*>(lambada_openai|piqa)</td>(.*?)</tr>", text, re.DOTALL))
    assert re.findall(r"<td[^>]*>([^<]*)</td>", rows["lambada_openai"])[-1] == "12.35"
    assert re.findall(r"<td[^>]*>([^<]*)</td>", rows["piqa"])[-1] == "–"


@pytest.fixture(scope="module")
def recovered(folders, tmp_path_factory):
    """The first of the folders, recovered."""
    home = tmp_path_factory.mktemp("recovered")
    dense = build("llama")
    dense.config._name_or_path = "toy<b>dense</b>"
    recover(folders[0], dense, tokens(6), out=home / "again", passes=3, batch=2, held_out=0.4, progress=False, device="cpu")
    return home / "again"


def test_a_recovered_model_has_a_page(recovered):
    text = write_page([recovered]).read_text()
    page = Checker(text)
    assert "script" not in page.tags and page.links == []
    report = json.loads((recovered / runs.RECOVERY_NAME).read_text())
    shown = " ".join(page.text)
    for part in (f"{report['sparsity']:.2%}", f"dense model: {report['perplexity_dense']:.4g}", "pruned to 50% with wanda masks"):
        assert part in shown
    marks = re.findall(r"<title>step (\d+): pruned model ([\d.]+)</title>", text)
    assert marks == [(f"{at['step']:g}", f"{at['perplexity']:.4g}") for at in report["held_out"]] and len(marks) > 2
    (line,) = re.findall(r'<polyline class="course b" points="([^"]*)"', text)
    assert len(line.split()) == len(report["losses"])
    for phase in report["phase_seconds"]:
        assert phase in shown


def test_a_recovered_model_beside_pruned_ones(folders, recovered, tmp_path):
    text = write_page([*folders, recovered], tmp_path / "all.html").read_text()
    page = Checker(text)
    table = text[text.index('class="runs"') : text.index("</table>")]
    assert re.findall(r"<td[^>]*>(.*?)</td>", table.split("update</td>")[1])[:3] == ["optimal", "none", "recovered"]
    assert "has no errors of layers" in " ".join(page.text) and page.tags.count("h2") == 4
    assert Checker(write_page([folders[0], recovered], tmp_path / "two.html").read_text()).tags.count("h2") == 3


def test_no_field_of_a_recovery_gets_into_the_page_as_markup(recovered, tmp_path, compiled_once):
    hostile, shown = "</title><script>alert(1)</script>'\"", 0
    data = json.loads((recovered / runs.RECOVERY_NAME).read_text())
    data |= {"losses": data["losses"][:2], "held_out": data["held_out"][:2], "warnings": ["a"]}
    for path in leaves(data):
        (tmp_path / runs.RECOVERY_NAME).write_text(json.dumps(replaced(data, path, hostile)))
        try:
            text = write_page([tmp_path, tmp_path]).read_text()
        except ValueError as error:
            assert str(tmp_path) in str(error), path
            continue
        shown += "&lt;script&gt;alert(1)" in text
        assert "<script" not in text and "\"'\"" not in text, path
    assert shown > 20


@pytest.mark.parametrize("key, value, culprit", [
    ("held_out", [], "held_out is empty"), ("held_out", [{"step": 0, "loss": 1.0}], r"held_out\[0\].perplexity is missing"),
    ("losses", ["x"], r"losses\[0\]: "),
])  # fmt: skip
def test_a_key_of_a_recovery_that_is_wrong_is_named(recovered, tmp_path, key, value, culprit):
    data = json.loads((recovered / runs.RECOVERY_NAME).read_text()) | {key: value}
    (tmp_path / runs.RECOVERY_NAME).write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path / runs.RECOVERY_NAME))}: {culprit}"):
        write_page([tmp_path])


def test_folders_that_are_no_runs_are_named(folders, tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no qprecon_report.json" in capsys.readouterr().err
    (tmp_path / runs.RECOVERY_NAME).write_text("{}")
    assert cli.main(["report", str(tmp_path)]) == 2 and str(tmp_path / runs.RECOVERY_NAME) in capsys.readouterr().err
    for text, culprit in (("no", "not JSON"), ('{"format": 7}', "another format")):
        (tmp_path / output.REPORT_NAME).write_text(text)
        with pytest.raises(ValueError, match=culprit):
            write_page([folders[0], tmp_path])
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "path", "value", "culprit"),
    [
        (output.REPORT_NAME, ("settings", "tol"), "small", "tol: input should be a valid number, got 'small'"),
        (output.REPORT_NAME, ("settings", "mask"), 3, "mask: "),
        (output.REPORT_NAME, ("settings", "pattern"), 3, "pattern: "),
        (output.REPORT_NAME, ("layers", 2, "zeros"), [], r"layers\[2\]\.zeros: "),
        (output.REPORT_NAME, ("layers",), [], "layers is empty"),
        (assessment.EVALUATION_NAME, ("perplexity", 0, "windows"), "4", r"perplexity\[0\]\.windows: "),
        (assessment.EVALUATION_NAME, ("tasks", 1, "acc"), None, r"tasks\[1\]\.acc: "),
        (assessment.EVALUATION_NAME, ("format",), 9, "format is 9"),
    ],
)
def test_a_key_that_is_wrong_is_named_with_its_file(folders, tmp_path, name, path, value, culprit):
    for other in (output.REPORT_NAME, assessment.EVALUATION_NAME):
        data = json.loads((folders[0] / other).read_text())
        (tmp_path / other).write_text(json.dumps(replaced(data, path, value) if other == name else data))
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path / name))}: {culprit}"):
        write_page([tmp_path])


def test_a_page_takes_the_place_of_a_page_only(folders, tmp_path):
    """`-o OUT/qprecon_report.json` would be the end of the report."""
    before = (folders[0] / runs.REPORT_NAME).read_bytes()
    for target in (folders[0] / runs.REPORT_NAME, folders[0] / "config.json", folders[0]):
        if target.exists():
            with pytest.raises(OSError, match="another name|name of a file in it"):
                write_page(folders, target)
    assert (folders[0] / runs.REPORT_NAME).read_bytes() == before
    for _ in range(2):
        assert write_page(folders, tmp_path / "page.html").read_text().startswith("<!")


@pytest.mark.parametrize("missing", ["jinja2", "pydantic"])
def test_a_missing_package_names_the_extra(folders, missing):
    code = f"import sys; sys.modules[{missing!r}] = None\nfrom qprecon.page import write_page\nwrite_page([{str(folders[0])!r}])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"ImportError: a report's page needs {missing}: pip install 'qprecon[report]'" in run.stderr


def test_neither_torch_nor_transformers_is_needed(folders, tmp_path):
    code = (
        f"import sys; sys.modules |= dict.fromkeys(['torch', 'transformers'])\nfrom qprecon.page import write_page\n"
        f"write_page([{str(folders[0])!r}], {str(tmp_path / 'page.html')!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "page.html").is_file()


def test_runs_of_one_name_are_told_apart(tmp_path):
    assert runs._names([tmp_path / "x" / "out", tmp_path / "y" / "out"]) == ["x/out", "y/out"]
    assert len(set(runs._names([tmp_path, tmp_path]))) == 1  # the same run twice ends too


@pytest.mark.parametrize("values", [[0.3, 1e-6], [0.0, 0.5], [1.0], [0.0], [1e-300, 1e300], [1.0, float("inf")]])
def test_scales_hold_their_values(values):
    small = [v for v in values if not 1e200 < v < float("inf")]
    for scale in (_log_scale(values), _linear_scale(small), _linear_scale(small, from_zero=False)):
        heights = [scale.y(value) for value in values]
        assert all(0 <= height <= 280 for height in heights)
        assert (heights[0] < heights[-1]) == (values[0] > values[-1])
        assert 2 <= len(scale.ticks) <= 12 and min(scale.ticks) >= scale.low * 0.999 - 1e-12


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_it_without_sideways_scrolling(folders, recovered, tmp_path, width):
    page = write_page([*folders, recovered], tmp_path / "page.html").read_text()
    # Only this copy has a script: it notes what the layout came to.
    probe = (
        "<script>addEventListener('load',()=>{const w=document.documentElement,s=[...document.querySelectorAll('svg.wide')];"
        "parent.document.documentElement.dataset.found=JSON.stringify({page:w.scrollWidth,window:innerWidth,charts:s.length,"
        "smallest:Math.min(...s.map(e=>e.getBoundingClientRect().width)),"
        "text:Math.min(...s.map(e=>e.querySelector('text').getBoundingClientRect().height)),"
        "background:getComputedStyle(document.body).backgroundColor})})</script>"
    )
    # In a frame, since a window of headless Chromium is never narrower than 500 pixels.
    framed = html.escape(page.replace("</body>", f"{probe}</body>"))
    (tmp_path / "probed.html").write_text(f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{framed}"></iframe>')
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --window-size=1400,1000 --dump-dom"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "probed.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = json.loads(html.unescape(re.search(r'<html data-found="(.*?)"', dom)[1]))
    assert found["window"] == width and found["page"] <= width
    assert found["charts"] == 10 and found["smallest"] > 0.8 * min(width, 900) and found["text"] > 9
    assert found["background"] != "rgba(0, 0, 0, 0)"
