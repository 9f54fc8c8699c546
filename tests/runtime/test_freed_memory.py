"""Where a control group limits a rank, freed memory goes back to the kernel, unless there is plenty."""

import subprocess
import sys

import pytest

from ttlaunch import contract
from ttlaunch.records.prediction import MAPPED_FROM
from ttlaunch.runtime.freed_memory import keep_if_plenty, keep_if_unlimited

MB = 10**6
THRESHOLDS = {name: str(MAPPED_FROM) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")}
GIVEN_BACK = """
import ctypes, sys
from ttlaunch.runtime.freed_memory import keep_if_plenty, keep_if_unlimited
from ttlaunch.runtime.resident import resident_bytes
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
if sys.argv[1:] == ["unlimited"]:
    assert keep_if_unlimited({})
elif len(sys.argv) > 1:
    assert keep_if_plenty({"TTLAUNCH_MEMORY": sys.argv[1]})

def made_and_freed():
    pieces = [c.malloc(2_000_000) for _ in range(10)]
    for piece in pieces:
        ctypes.memset(piece, 1, 2_000_000)
    full = resident_bytes()
    for piece in pieces:
        c.free(piece)
    return full - resident_bytes()

made_and_freed()
print(made_and_freed())
"""


@pytest.mark.parametrize(("plenty", "given_back"), [((), True), ((str(10**12),), False), (("unlimited",), False)])
def test_large_pieces_go_back_to_the_kernel_until_there_is_plenty_or_where_nothing_limits_the_rank(plenty, given_back):
    command = [sys.executable, "-c", GIVEN_BACK, *plenty]
    freed = int(subprocess.run(command, env=THRESHOLDS, check=True, capture_output=True).stdout)
    assert given_back == (freed > 15 * MB)


@pytest.mark.parametrize(("allowed", "to_come"), [(None, 0), (225 * MB, 0), (250 * MB, 30 * MB)])
def test_without_a_limit_or_with_little_room_nothing_changes(allowed, to_come):
    environment = {} if allowed is None else {contract.ENV_MEMORY: str(allowed)}
    assert not keep_if_plenty(environment, to_come=to_come, peak=100 * MB)


@pytest.mark.parametrize("name", [contract.ENV_MEMORY, "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_a_limit_and_thresholds_of_the_user_stay_as_they_are(name):
    assert not keep_if_unlimited({name: "1000000"})
