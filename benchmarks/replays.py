"""Whether a replay has the bits of its run in every synchronous recipe, and how long it takes: `PYTHONPATH=. python benchmarks/replays.py [--ranks 1-4]`.

Bits: each synchronous recipe in each of its forms trains on 1, 2, 3 and 4 ranks, all in this process, as far as a layout has so many. The last step is
then computed again from the newest checkpoint before it. To be met: the SHA-256 of all parameters, and the digest of every tensor, are those of the run.

Time: a run of `data_parallel` on two ranks with the model that it ships with, and replays of steps 1, 10 and 19 steps after a checkpoint. To be met: the
time to the state is at most that of as many steps of one process, and 5 s.

The same command goes on after the last case, see `kept_trials.py`.
"""

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from kept_trials import Row, add_options, exit_status, make_missing, open_folder

from tests.lab.recorded_runs import TINY, record_run
from ttlaunch import contract
from ttlaunch.app.dialogue import Unattended
from ttlaunch.diagnostics import LaunchError
from ttlaunch.lab.replay import prepare_replay, replay_steps
from ttlaunch.lab.repro import read_origin_of
from ttlaunch.records.replay import ReplayOrder
from ttlaunch.running.report import combine_digests

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "data_parallel": ("data_parallel", {}),
    "data_parallel with a codec": ("data_parallel", {"compression_config.kind": "int8"}),
    "hierarchical_parallel": ("hierarchical_parallel", {}),
    "sync_ps": ("sync_ps", {}),
    "sync_ps, two servers": ("sync_ps", {"sync_ps_config.num_servers": 2}),
    **{f"zero, stage {stage}": ("zero", {"zero_config.stage": stage}) for stage in range(4)},
    "pipeline_parallel": ("pipeline_parallel", {}),
    "tensor_parallel": ("tensor_parallel", {}),
    "classic_dp with a bound of 0": ("classic_dp", {"classic_dp_config.staleness_bound": 0}),
    "local_sgd": ("local_sgd", {"local_sgd_config.every": 2}),
    "diloco": ("diloco", {"diloco_config.every": 2}),
}
FOUR_BLOCKS = {"transformer_config.num_blocks": 4, "transformer_config.num_heads": 4}
"""A stage for each of four ranks, and a head."""
AHEAD, CHECKPOINT = (1, 10, 19), 20
ALLOWED_S = 5.0


def main() -> int:
    """Make the cases that are missing; status 1 if a limit is missed, 3 if cases are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1-4", help="the least and the most")
    add_options(parser, folder=".benchmarks/replays")
    given = parser.parse_args()
    folder = open_folder(given)
    least, _, most = given.ranks.partition("-")
    wanted = dict(_cases(range(int(least), int(most or least) + 1), folder / "runs"))
    chosen = make_missing(wanted, folder, for_s=given.for_s)
    bits = [one for one in chosen if one["kind"] == "bits"]
    equal = sum(one["equal"] for one in bits)
    print(f"{equal} of {len(bits)} replays have the SHA-256 and all digests of their runs: {_met(equal == len(bits))}")
    print(f"{sum(one['kind'] == 'none' for one in chosen)} forms have no layout with such a number of ranks")
    met = [equal == len(bits), *(_time_is_met(one) for one in chosen if one["kind"] == "time")]
    return exit_status(are_met=all(met), made=len(chosen), wanted=len(wanted))


def _cases(counts: range, runs: Path) -> Iterator[tuple[str, Callable[[], Row]]]:
    for form, (recipe, changed) in FORMS.items():
        for ranks in counts:
            yield f"{form}, {ranks} ranks", partial(_bits, recipe, changed, ranks=ranks, runs=runs)
    yield from ((f"{steps} steps", partial(_time, steps, runs=runs)) for steps in AHEAD)


def _bits(recipe: str, changed: dict[str, Any], *, ranks: int, runs: Path) -> Row:
    keys = {**FOUR_BLOCKS, **changed, "multihost_config.num_workers": None}
    try:
        run = record_run(recipe, runs, ranks=ranks, changed=keys)
    except LaunchError as error:
        return {"kind": "none", "reason": error.diagnostics[0].message}
    step = TINY["training_config.steps"]
    prepared = prepare_replay(read_origin_of(run), Unattended())
    found = replay_steps(prepared, order=ReplayOrder(step=step, shown=False, digests=False))
    sha256 = _parameters(run)
    row = {
        "kind": "bits",
        "began": found.began,
        "verdict": found.verdict,
        "tensors": found.agreement.tensors.get(step, 0),
        "sha256": sha256,
        "equal": found.verdict == "equal" and found.played.report.parameters_sha256 == sha256,
    }
    shutil.rmtree(run)
    return row


def _parameters(run: Path) -> str | None:
    """The SHA-256 of all parameters that the ranks of a run ended with."""
    ranks = json.loads((run / contract.PLAN_FILE).read_text(encoding="utf-8"))["world_size"]
    found = []
    for rank in range(ranks):
        records = map(contract.read_record, (run / contract.progress_file(rank)).read_bytes().splitlines())
        digests: dict[str, str] = {}
        for record in records:
            if record and record["kind"] == contract.KIND_PARAMETERS:
                digests |= record["digests"]
        found.append(digests)
    sha256: str | None = combine_digests(found)[0]
    return sha256


def _time(steps: int, *, runs: Path) -> Row:
    keys = dict.fromkeys(TINY) | {  # the model that the recipe ships with
        "training_config.steps": CHECKPOINT + max(AHEAD) + 1,
        "training_config.validation_interval": 1000,
        "checkpoint_config.interval": CHECKPOINT,
    }
    alone = record_run("data_parallel", runs, ranks=1, changed=keys)
    records = map(contract.read_record, (alone / contract.progress_file(0)).read_bytes().splitlines())
    ends = [one["time"] for one in records if one and one["kind"] == contract.KIND_STEP]
    step_s = statistics.median(after - before for before, after in pairwise(ends))
    run = record_run("data_parallel", runs, ranks=2, changed=keys)
    prepared = prepare_replay(read_origin_of(run), Unattended())
    found = replay_steps(prepared, order=ReplayOrder(step=CHECKPOINT + steps, shown=False, digests=False))
    for path in (alone, run):
        shutil.rmtree(path)
    row = {"kind": "time", "steps": CHECKPOINT + steps - found.began, "step_s": step_s, "took_s": found.duration_s}
    return row | {"verdict": found.verdict}


def _time_is_met(row: Row) -> bool:
    limit = row["steps"] * row["step_s"] + ALLOWED_S
    steps = f"{row['steps']} steps from a checkpoint, each {row['step_s'] * 1e3:.0f} ms in one process"
    print(f"{steps}: {row['took_s']:.1f} s (limit {limit:.1f} s): {_met(row['took_s'] <= limit)}")
    return bool(row["took_s"] <= limit)


def _met(is_met: object) -> str:
    return "met" if is_met else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
