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


def test_only_for_good_are_objects_never_gone_through_again():
    before = gc.get_freeze_count()
    with no_collection():
        pass
    assert gc.get_freeze_count() == before
    program = "import gc\nfrom qprecon.arrays.collector import no_collection\nwith no_collection(for_good=True): import json\n"
    program += "print(gc.get_freeze_count())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 0
