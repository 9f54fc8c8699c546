"""A program that is no recipe and prints rarely, for `benchmarks/hangs.py`: `rare.py LINES SECONDS`."""

import sys
import time

for line in range(int(sys.argv[1])):
    print(line, flush=True)
    time.sleep(float(sys.argv[2]))
