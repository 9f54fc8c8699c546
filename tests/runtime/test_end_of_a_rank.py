"""A rank that talks over gRPC ends in its own way; nothing of its libraries is taken apart."""

import subprocess
import sys

PROGRAM = """
import atexit, os, threading, time
from ttlaunch.runtime.entry import end_without_teardown


class Aborts:
    def __del__(self):
        os.abort()


def late():
    threading.main_thread().join()
    print("thread", end=" ")


one = Aborts()
threading.Thread(target=late).start()
atexit.register(print, "at exit", end=" ")
print("said", end=" ")
{end}
"""


def ended(end):
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_what_the_program_prints_at_its_end_comes_out_and_no_object_is_freed():
    assert (0, "said thread at exit ") == ended("end_without_teardown()")
    assert -6 == ended("")[0]  # Python alone frees it
