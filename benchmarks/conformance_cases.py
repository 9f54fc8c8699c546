"""The cases of `conformance.py`: what ranks run, what is done to them, and what the run has to show then."""

import signal
from typing import NamedTuple

NASTY = 'it\'s a "$HOME" `id`; {x} \\ * and\na second line'
WAIT = "echo up; while :; do sleep 0.1; done"
OBEY = f"trap 'echo told; exit 0' TERM; {WAIT}"
STUBBORN = f"trap '' TERM; {WAIT}"
FLOOD = b"x" * 300_000
BYTES = bytes(range(256)) * 40
MEET = """
import os
from mpi4py import MPI
total = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1)
assert str(MPI.COMM_WORLD.rank) == os.environ["TTLAUNCH_RANK"]
os.write(1, b"sum %d of %d\\n" % (total, MPI.COMM_WORLD.size))
"""
ABORT = """
import time
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    time.sleep(0.3)
    MPI.COMM_WORLD.Abort(3)
time.sleep(600)
"""
SMALL = (
    "training_config.steps=4",
    "training_config.validation_interval=4",
    "training_config.batch_size=6",
    "training_config.micro_batch_size=1",
    "transformer_config.num_blocks=1",
)
"""What recipes are set to: four steps of a small model."""
OUTER = {"OMPI_COMM_WORLD_RANK": "7", "PMIX_RANK": "7", "PMI_RANK": "7"}


class Case(NamedTuple):
    """One case.

    Attributes:
        name: A clause about the run.
        script: What each rank runs, for the shell.
        ranks: How many there are.
        status: With which the command ends.
        failure: Code, rank and cause of the report's failure; None if it has none.
        out: What each rank prints, with `{rank}` and `{size}` in it; None: not looked at.
        act: What is done once all ranks have printed `up`: a signal to the launcher, or whom to kill.
        options: Further options of `run`.
        environment: Variables of the shell from which it is started.
        python: Whether the script is Python and needs an engine with MPI.
        without_mpi: Whether the case is about engines without MPI.
        here_only: Whether it is about this machine alone.
        recipe: A recipe that is run in place of the script; it has to end with the bits of one process.
    """

    name: str
    script: str = ""
    ranks: int = 2
    status: int = 0
    failure: tuple[str, int | None, str] | None = None
    out: bytes | None = None
    act: str = ""
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    python: bool = False
    without_mpi: bool = False
    here_only: bool = False
    recipe: str = ""


def _exits(status: int) -> Case:
    script = f"[ $TTLAUNCH_RANK = 1 ] && exit {status}; {WAIT}"
    return Case(f"rank 1 exits with {status}", script, 3, 1, ("R003", 1, f"exited with status {status}"))


def _ends_itself(number: signal.Signals, code: str, clause: str) -> Case:
    script = f"[ $TTLAUNCH_RANK = 1 ] && {{ kill -{number} $$; sleep 60; }}; {WAIT}"
    return Case(f"rank 1 gets {number.name}", script, 2, 1, (code, 1, f"{clause} {number.name}"))


CASES = (
    *(Case(f"{ranks} ranks end well", "true", ranks, out=b"") for ranks in (1, 2, 3, 4)),
    Case("each rank knows who it is", 'echo "$TTLAUNCH_RANK of $TTLAUNCH_WORLD_SIZE"', 4, out=b"{rank} of {size}\n"),
    Case("each rank knows its role", 'echo "$TTLAUNCH_ROLE"', 2, out=b"rank\n"),
    Case("each rank runs once", 'echo once; [ -n "$TTLAUNCH_RUN_ID" ] || echo nowhere', 3, out=b"once\n"),
    Case(
        "a value with every special character",
        'printf "%s|" "$TT_NASTY"',
        out=NASTY.encode() + b"|",
        environment=(("TT_NASTY", NASTY),),
        here_only=True,
    ),
    Case("a value of `--env`", 'printf "%s|" "$NASTY"', out=NASTY.encode() + b"|", options=("--env", f"NASTY={NASTY}")),
    Case("an empty value of `--env`", 'printf "%s|" "${X-unset}"', out=b"|", options=("--env", "X=")),
    Case("a variable that nobody sets", 'printf "%s|" "${TT_NOT_SET-unset}"', out=b"unset|"),
    Case(
        "no variables of a surrounding mpirun",
        "env | grep -cE '^(OMPI|PMIX?|PRTE|OPAL)_'; true",
        out=b"0\n",
        environment=tuple(OUTER.items()),
        without_mpi=True,
    ),
    Case(
        "every byte", "for n in 0 1 2 3 4 5 6 7; do printf 'a\\000\\377\\033[2J\\r'; done", out=b"a\0\xff\x1b[2J\r" * 8
    ),
    Case("a line of 300 kB without an end", "head -c 300000 /dev/zero | tr '\\000' x", 3, out=FLOOD),
    Case("many lines", "i=0; while [ $i -lt 2000 ]; do echo line; i=$((i+1)); done", out=b"line\n" * 2000),
    Case("nothing on standard input", "cat; echo end", out=b"end\n"),
    Case("ranks that end at different times", "sleep 0.$TTLAUNCH_RANK; echo end", 3, out=b"end\n"),
    Case("a rank that ends with 0 ends no other", "[ $TTLAUNCH_RANK = 1 ] || { sleep 1; echo end; }", 2),
    *(_exits(status) for status in (1, 2, 3, 77, 126, 127, 254, 255)),
    _ends_itself(signal.SIGKILL, "R004", "was killed by"),
    _ends_itself(signal.SIGSEGV, "R004", "crashed with"),
    _ends_itself(signal.SIGABRT, "R004", "crashed with"),
    Case(
        "the first of two that exit is named",
        f"case $TTLAUNCH_RANK in 2) exit 4;; 1) sleep 1.5; exit 5;; esac; {WAIT}",
        3,
        1,
        ("R003", 2, "exited with status 4"),
    ),
    Case(
        "ranks that ignore SIGTERM are ended after a failure",
        f"[ $TTLAUNCH_RANK = 1 ] && {{ sleep 0.5; exit 3; }}; {STUBBORN}",
        3,
        1,
        ("R003", 1, "exited with status 3"),
    ),
    Case("Ctrl-C lets ranks end", OBEY, 3, 130, out=b"up\ntold\n", act="SIGINT"),
    Case("SIGTERM lets ranks end", OBEY, 3, 143, out=b"up\ntold\n", act="SIGTERM"),
    Case("Ctrl-C and ranks that ignore it", STUBBORN, 2, 130, act="SIGINT", options=("--grace", "1")),
    Case("rank 1 is killed", WAIT, 3, 1, ("R004", 1, "was killed by SIGKILL"), act="rank"),
    Case(
        "the shim of rank 1 is killed",
        WAIT,
        2,
        1,
        ("R006", 1, "was lost: its shim was killed from outside"),
        act="shim",
    ),
    Case(
        "the engine is killed",
        WAIT,
        2,
        1,
        ("R008", None, "was killed by SIGKILL; no rank had failed"),
        act="engine",
    ),
    Case("the supervisor is killed", WAIT, 2, -1, act="supervisor"),
    Case("the view is killed", WAIT, 2, -1, act="view"),
    Case("a daemon of a rank is ended", "setsid sleep 600 > /dev/null 2>&1 & sleep 0.2", 2, out=b""),
    Case("ranks meet in one world", MEET, 3, out=b"sum 6 of {size}\n", python=True),
    Case("a rank that aborts MPI is named", ABORT, 3, 1, ("R003", 1, "exited with status 3"), python=True),
    Case("data_parallel has the bits of one process", ranks=3, recipe="data_parallel"),
    Case("hierarchical_parallel has the bits of one process", ranks=4, recipe="hierarchical_parallel"),
    Case("zero has the bits of one process", ranks=2, recipe="zero"),
)
