"""The coordinator of an elastic run with 10,000 workers of which 1 % change every minute, for an hour of virtual time (S6).

    python benchmarks/membership_fleet.py [--workers N] [--minutes N] [--churn PART] [--seed N]

What decides is the coordinator's and the workers' own code (`ttlaunch/membership`); processes and messages are times on a virtual clock
(`tests/membership/fleet.py` has the rules that are checked after each transition). In the first two seconds of each minute, workers join, are
asked to leave, are killed or fall silent. Reports that change nothing, as a worker sends some in each second, are left out.

The time of a transition is that of one call of `coordinator.step`, by the kind of its first event: it takes the reports that have come
within 1 ms. Those that stop or begin an epoch look at every worker. The times are of a clock that runs on while others use the cores, so
take them when the machine is quiet. Ends with 1 if a rule is broken, or a limit is missed.
"""

import argparse
import gc
import sys
import time
from bisect import bisect
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.membership.explorer import Violation
from tests.membership.fleet import Climate, Fleet

MOST_S, MOST_MS = 30.0, 1.0


def main() -> int:
    """Let the time pass."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--churn", type=float, default=0.01, help="the part of the workers that changes in a minute")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    leaves = 1 << (8 * options.workers // 5).bit_length()
    climate = Climate(
        workers=options.workers,
        micro_batches=leaves,
        minutes=options.minutes,
        churn=options.churn,
        seed=options.seed,
    )
    began, used = time.perf_counter(), time.process_time()
    gc.disable()  # values have no circles; to look for some among all workers would only add to whatever event it falls on
    try:
        found = Fleet(climate).run()
    except Violation as violation:
        print(f"a rule is broken: {violation}")
        return 1
    real_s, processor_s = time.perf_counter() - began, time.process_time() - used
    changes = ", ".join(f"{count} {kind}" for kind, count in sorted(found.changes.items()))
    print(f"{options.workers} workers, {options.minutes} minutes, seed {options.seed}: {changes}")
    print(
        f"{found.epochs} epochs, {found.steps} steps, {found.fenced} reports of the lost refused; {found.workers} members"
    )
    print(f"{found.events:,} events in {sum(map(len, found.seconds.values())):,} transitions")
    every = sorted(seconds for kind in found.seconds.values() for seconds in kind)
    print(f"{'':12} {'count':>9} {'median':>9} {'p99':>9} {'largest':>9}  ms")
    for kind, seconds in [*sorted(found.seconds.items()), ("all", every)]:
        row = sorted(seconds)
        values = (row[len(row) // 2], row[len(row) * 99 // 100], row[-1])
        print(f"{kind:12} {len(row):9,} " + " ".join(f"{1e3 * value:9.3f}" for value in values))
    p99_ms = 1e3 * every[len(every) * 99 // 100]
    longer = len(every) - bisect(every, MOST_MS / 1e3)
    print(f"transitions  {sum(every):.1f} s in all, 99 % within {p99_ms:.3f} ms (at most {MOST_MS:g})")
    print(f"             {longer:,} take longer than {MOST_MS:g} ms, the longest {1e3 * every[-1]:.0f} ms")
    print(f"real time    {real_s:.1f} s (at most {MOST_S:g}); processor {processor_s:.1f} s")
    return int(real_s > MOST_S or p99_ms > MOST_MS)


if __name__ == "__main__":
    sys.exit(main())
