"""On PYTHONPATH for one hang of `benchmarks/hangs.py`: the ordered rank sleeps before it has imported anything."""

import json
import os
import time
from pathlib import Path

if "TTLAUNCH_RANK" in os.environ:
    order = json.loads(Path("order.json").read_text())
    if order["hang"] == "before_mpi" and int(os.environ["TTLAUNCH_RANK"]) == order["rank"]:
        Path("begun-0").write_text(repr(time.time()))
        Path("begun-0").rename("begun")
        time.sleep(10_000)  # stuck: before_mpi
