"""Press Ctrl-C while ranks train, and see whether a checkpoint that takes 20 s is whole: ttlaunch beside a bare mpirun.

    python benchmarks/checkpoint_on_interrupt.py [--rounds 3] [--seconds 20] [--ranks 2]

Both start the same program, `interrupted/save.py`, which saves when it is told to end. Measured from Ctrl-C to the last byte
that a rank has written, and counted: checkpoints that are whole, of as many as there are ranks. To be met: all under ttlaunch,
with its usual grace.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PROGRAM = Path(__file__).parent / "interrupted/save.py"
UP_S = 30.0
USUAL_GRACE_S = 30.0


class Ended(NamedTuple):
    """What came of one Ctrl-C.

    Attributes:
        whole: Checkpoints that have their name.
        wrote_s: From Ctrl-C to the last byte of the rank that wrote for the shortest time; 0: a rank wrote none.
        ended_s: From Ctrl-C to the end of the launcher.
    """

    whole: int
    wrote_s: float
    ended_s: float
    status: int


def main() -> int:
    """Print a line for each Ctrl-C; status 1 if a checkpoint under ttlaunch is not whole."""
    parser = argparse.ArgumentParser(description="Press Ctrl-C, and look for the checkpoint.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="that a checkpoint takes")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    program, ranks = [str(PROGRAM), f"{options.seconds:g}"], str(options.ranks)
    mpirun = [str(Path(sys.executable).with_name("mpirun")), "--oversubscribe", "--bind-to", "none", "-n", ranks]
    launchers = {
        "mpirun": [*mpirun, sys.executable, *program],
        "ttlaunch": [sys.executable, "-m", "ttlaunch", "run", program[0], "-n", ranks, "--", *program[1:]],
    }
    print(f"a checkpoint of {options.seconds:g} s; the usual grace is {USUAL_GRACE_S:g} s")
    print(f"{'launcher':10}{'whole':>10}{'wrote for':>12}{'ended after':>13}{'status':>8}")
    missing = 0
    for _ in range(options.rounds):
        for name, command in launchers.items():
            ended = _interrupted(command, ranks=options.ranks)
            missing += options.ranks - ended.whole if name == "ttlaunch" else 0
            print(
                f"{name:10}{f'{ended.whole} of {ranks}':>10}{ended.wrote_s:10.2f} s{ended.ended_s:11.2f} s{ended.status:8}",
                flush=True,
            )
    print("every checkpoint is whole under ttlaunch: " + ("MISSED" if missing else "met"))
    return 1 if missing else 0


def _interrupted(command: list[str], *, ranks: int) -> Ended:
    """Start a launcher in a folder of its own, press Ctrl-C once all ranks train, and wait for its end."""
    with tempfile.TemporaryDirectory(prefix="ttl-interrupt-") as folder:
        here = Path(folder)
        process = subprocess.Popen(
            command,
            cwd=here,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # the group that a terminal's Ctrl-C goes to
            env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        )
        try:
            _wait(lambda: len(list(here.glob("up-*"))) == ranks and process.poll() is None)
            pressed, pressed_at = time.monotonic(), time.time()
            os.killpg(process.pid, signal.SIGINT)
            status = process.wait(USUAL_GRACE_S + 30)
        finally:
            process.kill()
            process.wait()
        ended_s = time.monotonic() - pressed
        files = list(here.glob("checkpoint-*"))
        wrote = [path.stat().st_mtime - pressed_at for path in files]
        return Ended(
            whole=sum(not path.name.endswith(".part") for path in files),
            wrote_s=max(0.0, min(wrote)) if len(wrote) == ranks else 0.0,
            ended_s=ended_s,
            status=status,
        )


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + UP_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"ranks were not up within {UP_S:g} s")
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
