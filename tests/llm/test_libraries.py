"""transformers looks through its files once, and knows the same models as without our help."""

import subprocess
import sys

_OURS = "from qprecon.llm import import_libraries; import_libraries()"
_STRUCTURE = """
import sys
{how}
import transformers.models
print(sorted((kind, sorted(names)) for kind, names in sys.modules["transformers.models"]._import_structure.items()))
"""
_READ = """
import builtins, collections
import transformers  # the first look
read, plain = collections.Counter(), builtins.open
def counted(name, *args, **options):
    read["/models/" in str(name)] += 1
    return plain(name, *args, **options)
builtins.open = counted
{how}
print(read[True])
"""


def printed(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout


def test_models_are_known_as_without():
    plain = printed(_STRUCTURE.format(how=""))
    assert "LlamaForCausalLM" in plain and printed(_STRUCTURE.format(how=_OURS)) == plain


def test_each_file_of_a_model_is_read_once():
    assert int(printed(_READ.format(how="import transformers.models"))) > 100  # else this is needed no more
    assert int(printed(_READ.format(how=_OURS))) == 0


def test_a_transformers_that_has_other_insides_is_imported_all_the_same():
    changed = "from transformers.utils import import_utils; del import_utils.create_import_structure_from_path; "
    assert printed(f"{changed}{_OURS}; print('open')") == "open\n"
