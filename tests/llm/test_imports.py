"""What the package says where torch or transformers is missing."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_package_names_the_extra(missing):
    code = f"import sys; sys.modules[{missing!r}] = None\nimport qprecon.llm"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert f"ImportError: qprecon.llm needs {missing}: pip install 'qprecon[llm]'" in run.stderr
