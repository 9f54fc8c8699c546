"""The faults of `attribution.py` under others' launchers: which ranks does their output name?"""

import re
import subprocess
import sys
from pathlib import Path

from attribution_cells import BY_KERNEL, CLASSES, DEFAULT, HERE, OF_AGENTS, OF_SCRIPTS, OVER_SOCKETS, RANKS, Cell
from attribution_places import Place, start

HANGING_S = 20.0
_GUILTY = 2
_MPIRUN_NAMES = re.compile(r"\[prterun-[^\]]*@\d+,(\d+)\]|process rank (\d+)|invoked on rank (\d+)")
_TORCHRUN_NAMES = re.compile(r"Root Cause.*?rank\s*:\s*(\d+)", re.DOTALL)


def show_others(scratch: Path, group: Path | None) -> None:
    """Break each fault once in one rank of the program, and print what each launcher makes of it."""
    binaries = Path(sys.executable).parent
    bare = [str(binaries / "mpirun"), "--oversubscribe", "--bind-to", "none", "-n", str(RANKS), sys.executable]
    launchers = {
        "mpirun": (bare, _MPIRUN_NAMES),
        "torchrun": ([str(binaries / "torchrun"), "--nproc-per-node", str(RANKS)], _TORCHRUN_NAMES),
    }
    named_right: dict[str, int] = dict.fromkeys(launchers, 0)
    left_out = OF_AGENTS | OF_SCRIPTS | {"error in one role"}
    faults = [fault for fault in CLASSES if fault not in left_out and (fault != BY_KERNEL or group is not None)]
    print(f"{f'fault, in rank {_GUILTY}':32}" + "".join(f"{name:24}" for name in launchers))
    for fault in faults:
        told = []
        for name, (command, pattern) in launchers.items():
            words = [*command, "ring.py", *(["sockets"] if fault in OVER_SOCKETS else [])]
            cell, place = (
                Cell(HERE, DEFAULT, "program", fault, "rank", _GUILTY, 0),
                Place(HERE, group, subprocess.Popen),
            )
            ended = start(words, cell, place, scratch / f"{name} {fault}", within_s=HANGING_S)
            named = _ranks(pattern, ended.stdout + ended.stderr)
            named_right[name] += named == [_GUILTY]
            told.append(f"{'hangs' if ended.returncode == 124 else 'ends'}, names {named or 'none'}")
        print(f"{fault:32}" + "".join(f"{text:24}" for text in told), flush=True)
    print(
        "names only the right rank: " + ", ".join(f"{name} {named_right[name]} of {len(faults)}" for name in launchers)
    )


def _ranks(pattern: re.Pattern[str], text: str) -> list[int]:
    return sorted({int(next(filter(None, match.groups()))) for match in pattern.finditer(text)})
