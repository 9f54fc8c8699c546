"""The `ttlaunch` command before its command line is there."""

import subprocess
import sys

IN_A_CALLBACK = """
import signal, sys, time, weakref
from ttlaunch.__main__ import leave_at_interrupts

class Thing:
    pass

leave_at_interrupts()
thing = Thing()
reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
try:
    del thing
    for _ in range(1000):
        time.sleep(0.01)
    print("went on")
finally:
    print("tidied up")
"""


def test_an_interrupt_that_comes_where_python_drops_exceptions_ends_the_command_all_the_same():
    done = subprocess.run([sys.executable, "-c", IN_A_CALLBACK], capture_output=True, text=True, check=False)
    assert (130, "tidied up\n", "\ninterrupted\n") == (done.returncode, done.stdout, done.stderr)
