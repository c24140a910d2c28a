"""The collector of cycles rests while a command imports its libraries, and only then."""

import gc
import subprocess
import sys

import pytest

from qprecon.arrays.collector import no_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_it_rests_while_open_and_is_afterwards_as_it_was(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError), no_collection():
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


FOR_GOOD = "no_collection(for_good=True)"


@pytest.mark.parametrize(
    ("opened", "frozen"), [(["no_collection()"], False), ([FOR_GOOD], True), ([FOR_GOOD, "no_collection()"], True)]
)
def test_only_for_good_are_objects_never_gone_through_again(opened, frozen):
    """Once for good, always: a command imports its libraries, then the model's class."""
    program = "import gc\nfrom qprecon.arrays.collector import no_collection\nlast = []\n"
    for each in opened:
        program += f"with {each}: last = [[] for _ in range(1000)]\n"
    program += "print(any(item is last for item in gc.get_objects()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(not frozen)
