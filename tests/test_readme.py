"""The README's numbers are those of the committed results."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

from qprecon.llm.settings.fields import options
from qprecon.llm.settings.recipe import Recipe

ROOT = pathlib.Path(__file__).parent.parent


def test_the_tables_are_those_of_the_results():
    """`python benchmarks/tables/readme.py` rewrites them."""
    assert subprocess.run([sys.executable, ROOT / "benchmarks" / "tables" / "readme.py", "--check"]).returncode == 0


def test_the_counts_of_faults_are_those_of_the_campaign():
    """`python benchmarks/tables/faults.py` rewrites them."""
    assert subprocess.run([sys.executable, ROOT / "benchmarks" / "tables" / "faults.py", "--check"]).returncode == 0


def test_the_tables_of_low_bit_weights_are_those_of_the_results():
    """`python benchmarks/tables/grid.py` rewrites them."""
    assert subprocess.run([sys.executable, ROOT / "benchmarks" / "tables" / "grid.py", "--check"]).returncode == 0


def test_the_tables_of_several_gpus_are_those_of_the_results():
    """`python benchmarks/tables/scaling.py` rewrites them."""
    assert subprocess.run([sys.executable, ROOT / "benchmarks" / "tables" / "scaling.py", "--check"]).returncode == 0


def test_the_check_sees_a_changed_number(tmp_path):
    """A README with another number in a table fails."""
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("results", "__pycache__"))
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "benchmarks" / "results").symlink_to(ROOT / "benchmarks" / "results")
    script = tmp_path / "benchmarks" / "tables" / "readme.py"
    text = (ROOT / "README.md").read_text()
    (tmp_path / "README.md").write_text(text)
    assert subprocess.run([sys.executable, script, "--check"]).returncode == 0
    start = text.index("<!-- begin: presets -->")
    (tmp_path / "README.md").write_text(text[:start] + re.sub(r"\d+\.\d\d", "1.23", text[start:], count=1))
    assert subprocess.run([sys.executable, script, "--check"]).returncode == 1


def test_the_perplexities_in_the_help_are_those_of_the_results():
    """Of `--preset`: the only figures of results in the package itself."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "quality_smollm2-135m.json").read_text())
    wanted = {"pattern": "50%", "calibration": "wikitext2", "split": "test", "seed": 0, "recovered": False, "eval_windows": None}
    rows = [row for row in rows if not row["ingredients"] and wanted.items() <= row.items()]
    found = {row["preset"]: round(row["perplexity"]["wikitext2"]) for row in rows}
    (option,) = (known for each, known in options(Recipe) if each.name == "preset")
    assert option.help.endswith(f"perplexity {found['fast']}, {found['balanced']} and {found['best']}")


def test_the_times_in_the_help_are_those_of_the_results():
    """In words: how many times as long as `fast` the other presets take for a whole model on a GPU; the README has the inverse of
    the first one."""
    runs = json.loads((ROOT / "benchmarks" / "results" / "end_to_end_presets_h200.json").read_text())
    seconds = {run["settings"]["preset"]: run["seconds_beside_io"] for run in runs if " blocks)" not in run["model"]}
    times = {preset: round(took / seconds["fast"]) for preset, took in seconds.items()}
    words, shares = {2: "two", 3: "three", 4: "four", 5: "five"}, {2: "half", 3: "a third", 4: "a quarter"}
    (option,) = (known for each, known in options(Recipe) if each.name == "preset")
    assert f"about {words[times['balanced']]} times as long as fast" in option.help
    assert f"about {words[times['best']]} times as long)" in option.help
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"takes about {shares[times['balanced']]} of the time of `balanced`" in readme


def test_the_gains_of_refinement_and_recovery_in_words_are_those_of_the_results():
    """docs/reproducing.md compares them in a sentence."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "quality_smollm2-135m.json").read_text())
    best = {"preset": "best", "pattern": "50%", "calibration": "wikitext2", "seed": 0, "eval_windows": None}
    rows = [row for row in rows if best.items() <= row.items()]

    def gains(before, after):
        return [round(100 * (1 - after["perplexity"][text] / before["perplexity"][text])) for text in ("wikitext2", "c4")]

    refined = {tuple(row["ingredients"]): row for row in rows if row["split"] == "validation" and not row["recovered"]}
    wikitext, c4 = gains(refined[()], refined["refine=block",])
    on_test = {row["recovered"]: row for row in rows if row["split"] == "test" and not row["ingredients"]}
    page = " ".join((ROOT / "docs" / "reproducing.md").read_text().split())
    recovered = gains(on_test[False], on_test[True])[0]
    assert f"gains {wikitext} % on WikiText-2 and {c4} % on C4, where `recover` gains {recovered} %" in page
