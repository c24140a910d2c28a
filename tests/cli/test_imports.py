"""What a command imports first: the same as without, in less time, and nothing is told that is told elsewhere."""

import subprocess
import sys

_STRUCTURE = """
import sys
{before}
import transformers.models
from transformers.utils import import_utils
inside = sys.modules["transformers.models"]._import_structure
print(import_utils.create_import_structure_from_path.cache_info().misses > 0, sorted((k, sorted(v)) for k, v in inside.items()))
"""


def printed(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout


def test_models_are_known_as_without():
    plain = printed(_STRUCTURE.format(before=""))
    assert plain.startswith("True") and "LlamaForCausalLM" in plain
    ours = "from qprecon.cli._imports import importing\nwith importing(): pass"
    assert printed(_STRUCTURE.format(before=ours)) == plain


def test_each_file_of_a_model_is_read_once():
    program = """
import builtins, collections, sys
import transformers  # the first look
read, plain = collections.Counter(), builtins.open
def counted(name, *args, **options):
    read["/models/" in str(name)] += 1
    return plain(name, *args, **options)
builtins.open = counted
{how}
print(read[True])
"""
    assert int(printed(program.format(how="import transformers.models"))) > 100  # else this is needed no more
    ours = "from qprecon.cli._imports import importing\nwith importing(): pass"
    assert int(printed(program.format(how=ours))) == 0


def test_a_missing_library_is_told_where_it_is_used():
    program = """
import sys
sys.modules["transformers"] = None
from qprecon.cli._imports import importing
with importing():
    print("open")
"""
    assert printed(program) == "open\n"
