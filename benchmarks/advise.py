"""Does `ttlaunch advise` pick the form of a training that is the quickest on a cluster?

    PYTHONPATH=. python benchmarks/advise.py [--for-s 300] [--only WORDS] [--fresh]

Needs root: hosts are namespaces with their own sshd, on cables of limited speed, in control groups of limited memory.

A trial is a cluster and a training. All hosts share the processors of one machine, so cables and memory decide in these trials: steps are mostly
messages, or the forms that are quicker do not fit. `advise` is told what the cluster is like, as by somebody who has read the labels of its
cables and takes off the `1 - PAYLOAD` that headers and acknowledgements take of any cable. Then every form that it expects to take at most
`FAR` times as long as its first one, or one of the `LEAST` quickest, runs on the hosts with the command that it printed, also those that it
says do not fit; one that is killed, or has no steps to show after `LONGEST_S`, is no answer. Forms within `CLOSE` of the quickest run once
more, and the smaller of the two times counts: noise only adds.

An answer is right if its step takes at most `WITHIN` more than that of the quickest. A constant answer is one form for all trials; the best
one is right most often. Each trial is a line in `FOLDER/trials.jsonl`; the same command goes on after the last one, or within one that was cut off.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.in_cluster import start_in_cluster
from benchmarks.kept_trials import Row, add_options, exit_status, make_missing, open_folder
from tests.cluster.hosts import Cluster
from ttlaunch.running.metrics.telemetry import RankTelemetry
from ttlaunch.running.readers.recorded import read_run

WITHIN, RIGHT, WINNERS, CLUSTERS = 0.05, 0.9, 4, 3
FAR, LEAST = 2.0, 3
CLOSE = 0.25
LONGEST_S = 75.0
PAYLOAD = 0.94
_SECONDS_OF_STEPS = 4.0
_FEWEST, _MOST = 4, 60
_ROUNDS = 2


class Lab(NamedTuple):
    """What hosts are like.

    Attributes:
        mbit: What is on the label of each cable, which carries it each way; None: as much as this machine can.
        hosts: How many hosts there are.
        slow: How many times slower the cable of the last host is.
        memory: The bytes of each host; None: as much as there is.
    """

    mbit: float | None = None
    hosts: int = 2
    slow: float = 1.0
    memory: int | None = None

    @property
    def names(self) -> list[str]:
        return [f"node{number}" for number in range(self.hosts)]


LABS = {
    "slow cables": Lab(mbit=4),
    "very slow cables": Lab(mbit=2),
    "one slow cable": Lab(mbit=4, hosts=3, slow=3),
    "little memory": Lab(mbit=800, memory=1_250_000_000),
    "little memory, slow cables": Lab(mbit=4, memory=640_000_000),
}


class Training(NamedTuple):
    """A training: sequences of a global batch and of a micro-batch, the shape of its model, and for `local_sgd` the steps between two averages."""

    batch: int
    micro_batch: int
    blocks: int
    heads: int
    width: int
    length: int
    every: int | None = None

    def as_file(self) -> dict[str, Any]:
        """Return the content of `train.yaml`; with `every`, that of a training with `local_sgd`."""
        content: dict[str, Any] = {
            "training_config": {
                "steps": _MOST,
                "batch_size": self.batch,
                "micro_batch_size": self.micro_batch,
                "validation_sequences": 2,
                "validation_interval": 10_000,
            },
            "transformer_config": {
                "num_blocks": self.blocks,
                "num_heads": self.heads,
                "embedding_dim": self.width,
                "max_sequence_length": self.length,
            },
            "scheduler_config": {"warmup_steps": 1},
            "checkpoint_config": {"interval": None},
        }
        return content | ({} if self.every is None else {"local_sgd_config": {"every": self.every}})


TRAININGS = {
    "small": Training(12, 4, blocks=2, heads=2, width=64, length=32),
    "small, seldom averaged": Training(12, 4, blocks=2, heads=2, width=64, length=32, every=20),
    "deep": Training(12, 4, blocks=3, heads=2, width=64, length=32),
    "long": Training(16, 2, blocks=2, heads=2, width=32, length=256),
    "wide": Training(16, 4, blocks=2, heads=4, width=256, length=64),
    "large": Training(4, 1, blocks=4, heads=8, width=640, length=64),
    "one block": Training(2, 1, blocks=1, heads=8, width=1536, length=16),
}
BOTH, SAME = ("--ranks", "2"), ("--same-bits",)
ALL = ("--ranks", "3")
TRIALS: Sequence[tuple[str, str, tuple[str, ...]]] = (
    ("slow cables", "small", (*BOTH, *SAME)),
    ("slow cables", "small, seldom averaged", BOTH),
    ("very slow cables", "small", ()),
    ("very slow cables", "long", (*BOTH, *SAME)),
    ("one slow cable", "deep", (*ALL, *SAME)),
    ("little memory", "one block", SAME),
    ("very slow cables", "small", BOTH),
    ("little memory, slow cables", "large", SAME),
    ("little memory", "one block", ()),
    ("one slow cable", "small", ALL),
    ("slow cables", "wide", (*BOTH, *SAME)),
    ("slow cables", "long", (*BOTH, *SAME)),
)


def main() -> int:
    """Make the trials that are missing and judge all; status 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, folder=".benchmarks/advise")
    parser.set_defaults(for_s=300.0)
    parser.add_argument("--only", default="", help="words that the trial's name has to contain")
    options = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("hosts in namespaces need root")
    folder = open_folder(options)
    named = {
        f"{training} on {lab} {' '.join(asked)}".strip(): (lab, training, asked) for lab, training, asked in TRIALS
    }
    wanted = {
        name: partial(_trial, *one, folder)
        for name, one in named.items()
        if all(word in name for word in options.only.split())
    }
    rows = make_missing(wanted, folder, for_s=options.for_s)
    return _judge(rows, wanted=len(wanted))


def _trial(lab: str, training: str, asked: Sequence[str], folder: Path) -> Row:
    """Ask, run every form, and return all of it."""
    place = folder / "work"
    (place / "configurations/lab").mkdir(parents=True, exist_ok=True)
    (place / "train.yaml").write_text(json.dumps(TRAININGS[training].as_file()), encoding="utf-8")
    with _cluster(LABS[lab]) as cluster:
        (place / "configurations/lab/hosts.txt").write_text(cluster.hostfile(slots=1), encoding="utf-8")
        command = ["advise", "--on", "lab", "-c", "train.yaml", "--format", "json", "--top", "3"]
        begun = folder / "begun.json"  # a trial of minutes that is cut off goes on where it was
        key = [lab, training, *asked]
        known = json.loads(begun.read_text(encoding="utf-8")) if begun.exists() else {}
        if known.get("key") != key:
            ranking = _asked([*command, *_described(LABS[lab]), *asked], cluster, place)
            times = sorted(one["step_ms"] for one in ranking["ranked"])
            far = max(FAR * ranking["ranked"][0]["step_ms"], times[:LEAST][-1])
            known = {
                "key": key,
                "ranked": [one for one in ranking["ranked"] if one["step_ms"] <= far],
                "far": sum(one["step_ms"] > far for one in ranking["ranked"]),
                "rounds": {},
            }
        forms = [_Form(one, known["rounds"].get(one["command"], [])) for one in known["ranked"]]
        for round_ in range(_ROUNDS):
            best = min((form.measured_ms for form in forms if form.measured_ms), default=math.inf)
            for form in forms:
                is_near = round_ == 0 or (form.measured_ms or math.inf) <= (1 + CLOSE) * best
                if is_near and len(form.rounds) == round_:
                    form.rounds.append(
                        _measure(form.ranked, cluster, place, every=_every(form.ranked, TRAININGS[training]))
                    )
                    known["rounds"][form.ranked["command"]] = form.rounds
                    begun.write_text(json.dumps(known), encoding="utf-8")
    rows = [form.as_json() for form in forms]
    begun.unlink()
    return {"lab": lab, "far": known["far"], "forms": rows}


def _every(ranked: Mapping[str, Any], training: Training) -> int:
    """Return how many steps of a form lie between two averages."""
    return {"local_sgd": training.every or 8, "diloco": 10}.get(ranked["recipe"], 1)


@dataclass
class _Form:
    """A form that was ranked, and what each of its rounds gave: milliseconds of a step, or why there are none."""

    ranked: Mapping[str, Any]
    rounds: list[float | str]

    @property
    def measured_ms(self) -> float | None:
        return min((one for one in self.rounds if not isinstance(one, str)), default=None)

    def as_json(self) -> Row:
        names = ("recipe", "ranks", "values", "step_ms", "fits")
        found = [one for one in self.rounds if not isinstance(one, str)]
        failed = next((one for one in self.rounds if isinstance(one, str)), None)
        return {name: self.ranked[name] for name in names} | {"measured_ms": found, "failed": failed}


def _described(lab: Lab) -> list[str]:
    """Return the options that say what the hosts are like."""
    words = []
    if lab.mbit is not None:
        words += ["--link-gbps", f"{PAYLOAD * lab.mbit / 1e3:g}"]
    if lab.slow > 1:
        words += ["--slow-link", f"{lab.hosts - 1}={lab.slow:g}"]
    if lab.memory is not None:
        words += ["--fits", f"{lab.memory // 10**6}MB"]
    return words


@contextlib.contextmanager
def _cluster(lab: Lab) -> Iterator[Cluster]:
    with Cluster(names=lab.names, disk="real") as cluster, contextlib.ExitStack() as stack:
        for host in lab.names:
            if lab.mbit is not None:
                cluster.throttle(host, mbit=lab.mbit / (lab.slow if host == lab.names[-1] else 1.0))
            if lab.memory is not None:
                stack.enter_context(_limited(cluster, host, lab.memory))
        yield cluster


@contextlib.contextmanager
def _limited(cluster: Cluster, host: str, memory: int) -> Iterator[None]:
    """Put all processes of a host, and so all that they will start, into a control group with so much memory."""
    root = Path("/sys/fs/cgroup")
    is_second = (root / "cgroup.controllers").exists()
    group = (root if is_second else root / "memory") / f"ttl-advise-{os.getpid()}-{host}"
    group.mkdir()
    (group / ("memory.max" if is_second else "memory.limit_in_bytes")).write_text(str(memory), encoding="ascii")
    for pid in cluster.pids(host):
        (group / "cgroup.procs").write_text(str(pid), encoding="ascii")
    try:
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text(encoding="ascii").split():
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.procs").write_text(pid, encoding="ascii")
        group.rmdir()


def _asked(words: Sequence[str], cluster: Cluster, place: Path) -> dict[str, Any]:
    process = start_in_cluster(words, cluster, place)
    stdout, stderr = process.communicate(timeout=200)
    if process.returncode != 0:
        raise SystemExit(f"{shlex.join(words)}: {stderr or stdout}")
    found: dict[str, Any] = json.loads(stdout)
    return found


def _measure(ranked: Mapping[str, Any], cluster: Cluster, place: Path, *, every: int) -> float | str:
    """Run a form with the command that was printed and return the milliseconds of a step, also if it does not come to its end; or why not."""
    steps = min(_MOST, max(_FEWEST, 2 * every, int(_SECONDS_OF_STEPS * 1e3 / ranked["step_ms"])))
    steps -= steps % every
    runs = place / "runs"
    words = [*shlex.split(ranked["command"])[1:], "--set", f"training_config.steps={steps}"]
    before = set(runs.glob("*"))
    process = start_in_cluster([*words, "--grace", "5", "--format", "json"], cluster, place)
    is_long = False
    try:
        stdout, stderr = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        is_long = True  # ranks in a long step may not end within the grace period; the steps before it count
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    made = [one for one in runs.glob("*") if one not in before and one.is_dir() and not one.is_symlink()]
    telemetry = read_run(made[0]).telemetry if made else None
    times = [time_ms for one in telemetry or () if (time_ms := cycle_ms(one, every=every)) is not None]
    if (is_long or process.returncode == 0) and times:
        return max(times)
    return (stderr or stdout).strip()[-400:] or f"status {process.returncode}"


def cycle_ms(telemetry: RankTelemetry, *, every: int) -> float | None:
    """Return the mean step of a rank in milliseconds, of the medians of the steps at each place between two averages; None if there are too few.

    The first `every` steps are left out: in them memory is allocated.
    """
    of_place: dict[int, list[int]] = {}
    for step, microseconds in telemetry.steps.items():
        if step > every:
            of_place.setdefault(step % every, []).append(microseconds)
    if len(of_place) < every:
        return None
    return statistics.mean(statistics.median(one) for one in of_place.values()) / 1e3


def _judge(rows: Sequence[Row], *, wanted: int) -> int:
    """Print each trial and all figures beside their limits; return the exit status."""
    right: Counter[str] = Counter()
    constant: Counter[str] = Counter()
    for row in rows:
        times = {_name(one): min(one["measured_ms"]) for one in row["forms"] if one["measured_ms"]}
        chosen = _name(row["forms"][0])
        quickest = min(times, key=lambda name: times[name])
        constant.update(name for name, time_ms in times.items() if time_ms <= (1 + WITHIN) * times[quickest])
        more = times[chosen] / times[quickest] - 1 if chosen in times else float("inf")
        right[quickest.split()[0]] += 1
        row["is_right"] = more <= WITHIN
        mark = "right" if row["is_right"] else "WRONG"
        print(f"{mark}  {row['trial']}: {chosen} ({more:+.1%}); the quickest is {quickest}, {times[quickest]:.1f} ms")
    good = sum(row["is_right"] for row in rows)
    answer, count = max(constant.items(), key=lambda one: one[1], default=("none", 0))
    part = good / max(1, len(rows))
    figures = [
        (f"{good} of {len(rows)} answers are right", part >= RIGHT, f"at least {RIGHT:.0%}"),
        (f"recipes that win: {', '.join(sorted(right))}", len(right) >= WINNERS, f"at least {WINNERS}"),
        (
            f"clusters: {len({row['lab'] for row in rows})}",
            len({r["lab"] for r in rows}) >= CLUSTERS,
            f"at least {CLUSTERS}",
        ),
        (f"the best constant answer, {answer}, is right in {count}", good > count, "fewer than advise"),
    ]
    for text, is_met, limit in figures:
        print(f"{'met   ' if is_met else 'MISSED'}  {text} ({limit})")
    return exit_status(are_met=all(is_met for _, is_met, _ in figures), made=len(rows), wanted=wanted)


def _name(form: Mapping[str, Any]) -> str:
    return " ".join([form["recipe"], f"n={form['ranks']}", *(value.rpartition(".")[2] for value in form["values"])])


if __name__ == "__main__":
    sys.exit(main())
