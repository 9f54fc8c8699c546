"""Does `ttlaunch advise` pick the form of a training that is the quickest on a cluster?

    PYTHONPATH=. python benchmarks/advise.py [--for-s 300] [--only WORDS] [--fresh]

Needs root: hosts are namespaces with their own sshd, on cables of limited speed and delay, in control groups of limited memory.

A trial is a cluster and a training. `advise` is told what the cluster is like, as by somebody who has read the labels of its cables, and
measures itself how long a micro-batch takes. Then every form that it knows runs on the hosts with the command that it printed, also those
that it says do not fit; one that is killed, or has no steps to show after `LONGEST_S`, is no answer. Forms within `CLOSE` of the quickest run
once more, and the smaller of the two times counts: noise only adds.

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

from benchmarks.kept_trials import Row, add_options, exit_status, make_missing, open_folder
from tests.cluster.hosts import Cluster
from ttlaunch.running.metrics.telemetry import RankTelemetry
from ttlaunch.running.readers.recorded import read_run

WITHIN, RIGHT, WINNERS, CLUSTERS = 0.05, 0.9, 4, 3
CLOSE = 0.4
LONGEST_S = 15.0
_SECONDS_OF_STEPS = 3.0
_FEWEST, _MOST = 4, 60
_ROUNDS = 2
_HOSTS = ("node0", "node1")


class Lab(NamedTuple):
    """What two hosts are like.

    Attributes:
        mbit: What each cable carries each way; None: as much as this machine can.
        delay_ms: How long a message travels.
        memory: The bytes of each host; None: as much as there is.
    """

    mbit: float | None = None
    delay_ms: float = 0.0
    memory: int | None = None


LABS = {
    "quick cables": Lab(),
    "slow cables": Lab(mbit=20),
    "very slow cables": Lab(mbit=4),
    "late cables": Lab(delay_ms=30),
    "little memory": Lab(mbit=100, memory=640_000_000),
}
TRAININGS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "small": {
        "training_config": {"batch_size": 8, "micro_batch_size": 1},
        "transformer_config": {"num_blocks": 2, "num_heads": 2, "embedding_dim": 64, "max_sequence_length": 32},
    },
    "wide": {
        "training_config": {"batch_size": 16, "micro_batch_size": 4},
        "transformer_config": {"num_blocks": 2, "num_heads": 4, "embedding_dim": 256, "max_sequence_length": 64},
    },
    "one micro-batch": {
        "training_config": {"batch_size": 4, "micro_batch_size": 4},
        "transformer_config": {"num_blocks": 2, "num_heads": 8, "embedding_dim": 512, "max_sequence_length": 64},
    },
    "large": {
        "training_config": {"batch_size": 4, "micro_batch_size": 1},
        "transformer_config": {"num_blocks": 4, "num_heads": 8, "embedding_dim": 640, "max_sequence_length": 64},
    },
}
SHARED: Mapping[str, Mapping[str, Any]] = {
    "training_config": {"steps": _MOST, "validation_sequences": 2, "validation_interval": 10_000},
    "scheduler_config": {"warmup_steps": 1},
    "checkpoint_config": {"interval": None},
}
BOTH, SAME = ("--ranks", "2"), ("--same-bits",)
TRIALS: Sequence[tuple[str, str, tuple[str, ...]]] = (
    ("slow cables", "wide", (*BOTH, *SAME)),
    ("late cables", "small", (*BOTH, *SAME)),
    ("quick cables", "one micro-batch", ()),
    ("late cables", "small", ()),
    ("little memory", "large", ()),
    ("slow cables", "wide", BOTH),
    ("late cables", "wide", ()),
    ("very slow cables", "small", (*BOTH, *SAME)),
    ("quick cables", "wide", BOTH),
    ("little memory", "large", SAME),
    ("very slow cables", "wide", ()),
    ("quick cables", "one micro-batch", SAME),
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
    content = {name: {**SHARED.get(name, {}), **TRAININGS[training].get(name, {})} for name in SHARED}
    content |= {"transformer_config": TRAININGS[training]["transformer_config"]}
    (place / "train.yaml").write_text(json.dumps(content), encoding="utf-8")
    with _cluster(LABS[lab]) as cluster:
        (place / "configurations/lab/hosts.txt").write_text(cluster.hostfile(slots=1), encoding="utf-8")
        command = ["advise", "--on", "lab", "-c", "train.yaml", "--calibrate", "--format", "json", "--top", "1000"]
        begun = folder / "begun.json"  # a trial of minutes that is cut off goes on where it was
        key = [lab, training, *asked]
        known = json.loads(begun.read_text(encoding="utf-8")) if begun.exists() else {}
        if known.get("key") != key:
            ranking = _asked([*command, *_described(LABS[lab]), *asked], cluster, place)
            known = {
                "key": key,
                "compute_ms": ranking["conditions"]["compute_ms"],
                "ranked": ranking["ranked"],
                "rounds": {},
            }
        forms = [_Form(one, known["rounds"].get(one["command"], [])) for one in known["ranked"]]
        for round_ in range(_ROUNDS):
            best = min((form.measured_ms for form in forms if form.measured_ms), default=math.inf)
            for form in forms:
                is_near = round_ == 0 or (form.measured_ms or math.inf) <= (1 + CLOSE) * best
                if is_near and len(form.rounds) == round_:
                    form.rounds.append(_measure(form.ranked, cluster, place))
                    known["rounds"][form.ranked["command"]] = form.rounds
                    begun.write_text(json.dumps(known), encoding="utf-8")
    rows = [form.as_json() for form in forms]
    begun.unlink()
    return {"lab": lab, "compute_ms": known["compute_ms"], "forms": rows}


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
        words += ["--link-gbps", f"{lab.mbit / 1e3:g}"]
    if lab.delay_ms:
        words += ["--link-us", f"{lab.delay_ms * 1e3:g}"]
    if lab.memory is not None:
        words += ["--fits", f"{lab.memory // 10**6}MB"]
    return words


@contextlib.contextmanager
def _cluster(lab: Lab) -> Iterator[Cluster]:
    with Cluster(names=_HOSTS) as cluster, contextlib.ExitStack() as stack:
        for host in _HOSTS:
            if lab.mbit is not None:
                cluster.throttle(host, mbit=lab.mbit)
            if lab.memory is not None:
                stack.enter_context(_limited(cluster, host, lab.memory))
        if lab.delay_ms:
            cluster.delay(_HOSTS[0], lab.delay_ms)
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
    process = _start(words, cluster, place)
    stdout, stderr = process.communicate(timeout=200)
    if process.returncode != 0:
        raise SystemExit(f"{shlex.join(words)}: {stderr or stdout}")
    found: dict[str, Any] = json.loads(stdout)
    return found


def _start(words: Sequence[str], cluster: Cluster, place: Path) -> "subprocess.Popen[str]":
    started: subprocess.Popen[str] = cluster.popen(
        "launcher",
        [sys.executable, "-m", "ttlaunch", *words],
        cwd=place,
        env=cluster.environment("launcher"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    return started


def _measure(ranked: Mapping[str, Any], cluster: Cluster, place: Path) -> float | str:
    """Run a form with the command that was printed and return the milliseconds of a step, also if it does not come to its end; or why not."""
    every = {"local_sgd": 8, "diloco": 10}.get(ranked["recipe"], 1)
    steps = min(_MOST, max(_FEWEST, 2 * every, int(_SECONDS_OF_STEPS * 1e3 / ranked["step_ms"])))
    steps -= steps % every
    runs = place / "runs"
    words = [*shlex.split(ranked["command"])[1:], "--set", f"training_config.steps={steps}"]
    before = set(runs.glob("*"))
    process = _start([*words, "--grace", "5", "--format", "json"], cluster, place)
    is_long = False
    try:
        stdout, stderr = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        is_long = True  # ranks in a long step may not end within the grace period; the steps before it count
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    made = [one for one in runs.glob("*") if one not in before and not one.is_symlink()]
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
