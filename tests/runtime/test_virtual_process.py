"""A process that runs ranks on a virtual clock keeps the memory that it frees; one that predicts memory does not (S1)."""

import subprocess
import sys

import pytest

FREES = """
import numpy as np, resource
from ttlaunch.runtime.virtual_process import prepare_process
prepare_process()
np.ones(1_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    np.ones(1_000_000)  # 8 MB: two thousand pages
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(("chosen", "is_kept"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "65536"}, False)])
def test_arrays_that_are_made_again_and_again_take_no_new_pages_unless_the_user_has_chosen_otherwise(chosen, is_kept):
    done = subprocess.run([sys.executable, "-c", FREES], env=chosen, capture_output=True, text=True, check=True)

    assert is_kept == (int(done.stdout) < 2_000)
