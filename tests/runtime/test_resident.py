"""How much memory a process has, and has had."""

import mmap
import subprocess
import sys

from ttlaunch.runtime.resident import peak_resident_bytes, resident_bytes

MB = 10**6


def test_the_peak_stays_when_the_memory_is_given_back():
    before = resident_bytes()
    # A mapping of its own: an allocator may keep what a `bytearray` gave back.
    with mmap.mmap(-1, 100 * MB) as held:
        for _ in range(100):
            held.write(b"x" * MB)
        assert resident_bytes() - before > 90 * MB
    assert resident_bytes() - before < 50 * MB
    assert peak_resident_bytes() - before > 90 * MB


def test_the_memory_of_the_process_that_started_this_one_does_not_count():
    asks = "from ttlaunch.runtime.resident import peak_resident_bytes; print(peak_resident_bytes())"
    starts = f"import subprocess, sys; held = bytearray(b'x') * {400 * MB}; subprocess.run([sys.executable, '-c', {asks!r}], check=True)"
    done = subprocess.run([sys.executable, "-c", starts], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 300 * MB
