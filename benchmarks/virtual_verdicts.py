"""Faults in simulations and in real runs: is the verdict the same (S5)?

    python benchmarks/virtual_verdicts.py [--results FILE] [--only WORDS]

Each of thirteen plans of faults breaks a real run with `ttlaunch chaos`, and is simulated with `ttlaunch simulate --virtual`. Both have to end
with the same status, the same code, the same rank or host, and the same outcome of each fault. The plans have killed, crashed, ended and
stopped ranks of five recipes, pauses, a straggler, a killed shim and a killed mpirun, Ctrl-C, and, as root, a cut host.

Each plan is a line in FILE; the same command goes on after those that are there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.in_cluster import start_in_cluster
from tests.cluster.hosts import Cluster

WITHIN_S = 120
TRAINING = """\
training_config: {steps: 400, batch_size: 8, micro_batch_size: 2, validation_sequences: 4, validation_interval: 1000}
transformer_config: {num_blocks: 2, num_heads: 2, embedding_dim: 16, max_sequence_length: 16}
checkpoint_config: {interval: null}
"""
TWO = ("--set", "multihost_config.num_workers=2")
BLOCKS = ("--set", "multihost_config.pipeline_parallel_config.blocks_per_rank=[1, 1]")
HANG = ("--hang-timeout", "3")
FAILS = ("--set", "sync_ps_config.straggler=fail", "--set", "sync_ps_config.straggler_timeout_s=0.5")


class Case(NamedTuple):
    """A plan of faults.

    Attributes:
        options: Those of both commands.
        real, virtual: Those of one of them.
        over_hosts: Whether it needs hosts.
    """

    recipe: str
    plan: str
    options: tuple[str, ...] = TWO
    real: tuple[str, ...] = ()
    virtual: tuple[str, ...] = ()
    over_hosts: bool = False


CASES = (
    Case("data_parallel", "kill rank=1 at step=20"),
    Case("data_parallel", "segv rank=0 at step=20"),
    Case("zero", "term rank=1 at step=20"),
    Case("hierarchical_parallel", "kill role=optimizer at step=20"),
    Case("pipeline_parallel", "kill rank=1 at step=20; kill rank=0 at step=399", options=BLOCKS),
    Case("data_parallel", "stop rank=1 at step=20", options=(*TWO, *HANG)),
    Case("hierarchical_parallel", "stop role=aggregator at step=20; kill rank=0 at step=399", options=(*TWO, *HANG)),
    Case("hierarchical_parallel", "stop rank=0 at step=3; continue rank=0 at step=3; kill rank=1 at step=40"),
    Case("data_parallel", "kill shim=1 at step=20"),
    Case("data_parallel", "kill mpirun at step=20"),
    Case("data_parallel", "interrupt at step=20"),
    Case(
        "sync_ps",
        "interrupt at 500s",
        options=(*TWO, *FAILS),
        real=("--set", "sync_ps_config.slow_workers={1: 1000}"),
        virtual=("--slow", "1=20000"),
    ),
    Case("data_parallel", "cut host=node1 at step=20", options=(*TWO, "--on", "lab", "--lease", "5"), over_hosts=True),
)


def main() -> int:
    """Compare; status 1 if a verdict differs."""
    parser = argparse.ArgumentParser(description="Compare the verdicts of simulated and real runs with faults.")
    results = Path(__file__).parents[1] / ".benchmarks/virtual_verdicts.jsonl"
    parser.add_argument("--results", type=Path, default=results, help="a line for each plan is added")
    parser.add_argument("--only", default="", help="words that recipe and plan have to contain")
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    known = {(one["recipe"], one["plan"]): one for one in _read(options.results)}
    found = []
    with ExitStack() as stack:
        for case in _cases(options.only):
            entry = known.get((case.recipe, case.plan))
            if entry is None:
                cluster = stack.enter_context(Cluster(hosts=2, disk="real")) if case.over_hosts else None
                entry = {"recipe": case.recipe, "plan": case.plan, **_compare(case, cluster)}
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")
            found.append(entry)
            is_same = _is_same(entry)
            mark = "same" if is_same else "DIFFERENT"
            print(f"{mark:10}{case.recipe}: {case.plan}", flush=True)
            for side in ("real", "virtual") if mark != "same" else ("real",):
                print(f"          {side:8}{entry[side]}", flush=True)
    same = sum(map(_is_same, found))
    print(f"{same} of {len(found)} plans end with the same verdict (limit: all)")
    return 0 if same == len(found) else 1


def _is_same(entry: dict[str, Any]) -> bool:
    """Whether the verdicts are the same; two that nothing came of are none."""
    return entry["real"] == entry["virtual"] and len(entry["real"]) > 1


def _read(results: Path) -> list[dict[str, Any]]:
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return [json.loads(line) for line in lines]


def _cases(only: str) -> Iterator[Case]:
    for case in CASES:
        if all(word in f"{case.recipe} {case.plan}" for word in only.split()):
            if case.over_hosts and os.geteuid() != 0:
                print(f"left out  {case.recipe}: {case.plan}: hosts in namespaces need root")
            else:
                yield case


def _compare(case: Case, cluster: Cluster | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ttl-verdicts-") as place:
        folder = Path(place)
        (folder / "train.yaml").write_text(TRAINING, encoding="utf-8")
        if cluster is not None:
            (folder / "configurations/lab").mkdir(parents=True)
            (folder / "configurations/lab/hosts.txt").write_text(cluster.hostfile(), encoding="utf-8")
        given = ("-c", "train.yaml", "--plan", case.plan, "--format", "json", *case.options)
        real = _run(("chaos", case.recipe, *given, *case.real), folder, cluster)
        virtual = _run(("simulate", case.recipe, "--virtual", *given, *case.virtual), folder, cluster)
    report, verdict = real.get("report", real), virtual.get("verdict") or virtual
    return {"real": _verdict(report, real.get("faults", [])), "virtual": _verdict(verdict, verdict.get("faults", []))}


def _verdict(report: dict[str, Any], faults: list[dict[str, Any]]) -> list[Any]:
    """Status, code, rank and, without a rank, host of the failure, and what came of each fault."""
    if "status" not in report:
        return [report.get("error", "nothing")]
    failure = report["failure"] or {}
    host = failure.get("host") if failure.get("rank") is None else None
    return [report["status"], failure.get("code"), failure.get("rank"), host, [one["outcome"] for one in faults]]


def _run(words: tuple[str, ...], folder: Path, cluster: Cluster | None) -> dict[str, Any]:
    if cluster is None:
        command = [sys.executable, "-m", "ttlaunch", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WITHIN_S, check=False)
        stdout, stderr = done.stdout, done.stderr
    else:
        process = start_in_cluster(words, cluster, folder)
        stdout, stderr = process.communicate(timeout=WITHIN_S)
    try:
        content: dict[str, Any] = json.loads(stdout)
    except ValueError:
        return {"error": (stderr.strip() or stdout.strip()).splitlines()[:3]}
    return content


if __name__ == "__main__":
    sys.exit(main())
