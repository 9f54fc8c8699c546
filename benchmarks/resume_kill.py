"""Kill -9 at random moments, resume, and compare the bits: the end is always that of the run nobody disturbed.

    python benchmarks/resume_kill.py [--times 100] [--seed 0] [--folder DIR] [--minutes 10] [--fresh]

Each attempt is `ttlaunch run … --resume latest` in a layout drawn at random: one process, two tiers, three tiers, data
parallel, or a pipeline of two or four stages. Half of the kills come at a random moment of the attempt, the other half within a few
milliseconds of a checkpoint that has begun to appear. The victim is drawn too: a rank, mpirun, the launcher, or all at
once. When a training reaches its last step its SHA-256 is compared and the next training begins, until there were so
many kills; a checkpoint is made every 3 steps. Every checkpoint that a resume passed over is counted with its reason, and
the files of each that was chosen are read and compared with its manifest once more, here.

Each training that came to its end is a line in `.benchmarks/resume_kill.jsonl`; the same command goes on after the last one,
as long as nothing that computes was changed. `--minutes` ends it early; 100 kills take about a quarter of an hour on 2 cores.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_STAGES = "multihost_config: {{pipeline_parallel_config: {{blocks_per_rank: {}}}}}\n"
SECTIONS = """\
training_config: {steps: 60, batch_size: 4, micro_batch_size: 1, validation_sequences: 4, validation_interval: 1000}
transformer_config: {num_blocks: 4, num_heads: 2, embedding_dim: 128, max_sequence_length: 16, dropout_prob: 0.1}
scheduler_config: {type: cosine, warmup_steps: 5}
checkpoint_config: {interval: 3}
"""
LAYOUTS = {
    "one process": ("hierarchical_parallel", 1, ""),
    "two tiers": ("hierarchical_parallel", 3, "multihost_config: {num_workers: 2}\n"),
    "three tiers": ("hierarchical_parallel", 4, "multihost_config: {num_workers: 2}\n"),
    "data parallel": ("data_parallel", 3, "multihost_config: {num_workers: 3}\n"),
    "two stages": ("pipeline_parallel", 2, _STAGES.format([2, 2])),
    "four stages": ("pipeline_parallel", 4, _STAGES.format([1, 1, 1, 1])),
}
LONGEST_S = 300.0


KEPT = Path(__file__).parents[1] / ".benchmarks" / "resume_kill.jsonl"


@dataclass
class Tally:
    """What has happened, in one training or in all."""

    kills: int = 0
    while_saving: int = 0
    finished: int = 0
    resumed: int = 0
    torn: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    passed_over: dict[str, int] = field(default_factory=dict)
    victims: dict[str, int] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        """Count another one in."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(value, dict):
                for key, count in value.items():
                    mine[key] = mine.get(key, 0) + count
            else:
                setattr(self, name, mine + value)


class Attempt:
    """One `ttlaunch run`."""

    def __init__(self, folder: Path, layout: str, *, resume: bool) -> None:
        recipe, ranks, section = LAYOUTS[layout]
        config = folder / "train.yaml"
        config.write_text(SECTIONS + section)
        before = _runs(folder)
        words = ["run", recipe, "--ranks", str(ranks), "-c", str(config), "--format", "json"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ttlaunch", *words, *(["--resume", "latest"] if resume else [])],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._folder, self._before = folder, before

    @property
    def run_folder(self) -> Path | None:
        return next(iter(_runs(self._folder) - self._before), None)

    def is_saving(self) -> bool:
        run = self.run_folder
        return run is not None and any((run / "checkpoints").glob("step-*.tmp"))

    def victims(self) -> dict[str, list[int]]:
        """Process ids by what they are, as far as they run by now."""
        found, run = {"view": [self.process.pid]}, self.run_folder or self._folder
        with _suppressed():
            found["supervisor"] = [json.loads((run / "launcher.json").read_text())["pid"]]
            found["mpirun"] = [json.loads((run / "events.jsonl").read_text().splitlines()[0])["mpirun"]]
        for path in sorted(run.glob("records/rank-*.progress.jsonl")):
            with _suppressed():
                found[path.name.split(".")[0]] = [json.loads(path.read_text().splitlines()[0])["pid"]]
        return found | {"all at once": [pid for pids in found.values() for pid in pids]}

    def result(self) -> tuple[dict[str, Any] | None, str]:
        """The report, if the run came to its end, and what it said."""
        from ttlaunch.agent.run_processes import run_processes

        out, err = self.process.communicate(timeout=LONGEST_S)
        run = self.run_folder
        deadline = time.monotonic() + 20
        while run is not None and run_processes(run.name):
            if time.monotonic() > deadline:
                for pid in run_processes(run.name):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        report = json.loads(out) if self.process.returncode == 0 else None
        return report, (err if report else err + out).decode(errors="replace")


class _suppressed:  # noqa: N801 - used like contextlib.suppress
    """A process or file that has gone meanwhile is no news."""

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> bool:
        return kind is not None and issubclass(kind, OSError | ValueError | IndexError)


def _runs(folder: Path) -> set[Path]:
    return {path for path in (folder / "runs").glob("[!.]*") if path.is_dir()}


def main() -> int:
    """Run, kill, resume, compare."""
    from ttlaunch.lab.parity import code_hash

    parser = argparse.ArgumentParser(description="Kill -9 at random moments, resume, compare the bits.")
    parser.add_argument("--times", type=int, default=100, help="kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="where runs are made")
    parser.add_argument("--minutes", type=float, default=None, help="after which no other training is begun")
    parser.add_argument("--fresh", action="store_true", help="forget what was kept")
    options = parser.parse_args()
    if options.fresh:
        KEPT.unlink(missing_ok=True)
    KEPT.parent.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="resume-kill-", dir=options.folder))
    about = {"code": code_hash(), "seed": options.seed}
    began, tally = time.monotonic(), _kept(about)
    if tally.finished:
        print(f"going on after {tally.finished} trainings with {tally.kills} kills")
    try:
        expected, typical_s = _undisturbed(scratch / "undisturbed")
        while tally.kills < options.times and not _is_over(began, options.minutes):
            chance = random.Random(f"{options.seed} {tally.finished}")  # noqa: S311 - nothing secret
            one = _one_training(scratch / "training", expected, typical_s, chance, options.times - tally.kills)
            tally.add(one)
            shutil.rmtree(scratch / "training")
            with KEPT.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**about, **asdict(one)}) + "\n")
            print(
                f"{tally.kills:4} kills, {tally.finished} trainings, {len(tally.wrong)} wrong, {tally.torn} torn",
                flush=True,
            )
    finally:
        shutil.rmtree(scratch)
    _show(tally)
    return 1 if tally.wrong or tally.torn else 0


def _kept(about: dict[str, Any]) -> Tally:
    """What earlier calls with this code and seed came to."""
    tally = Tally()
    for line in KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else ():
        entry = json.loads(line)
        if all(entry.pop(name) == value for name, value in about.items()):
            tally.add(Tally(**entry))
    return tally


def _is_over(began: float, minutes: float | None) -> bool:
    return minutes is not None and time.monotonic() - began > 60 * minutes


def _show(tally: Tally) -> None:
    print(f"{tally.kills} kills ({tally.while_saving} within milliseconds of a checkpoint that began to appear)")
    print(f"  victims            {_listed(tally.victims)}")
    print(f"  resumed            {tally.resumed} times from a checkpoint, of which torn: {tally.torn} (to be met: 0)")
    print(f"  passed over        {_listed(tally.passed_over) or 'none'}")
    print(f"  trainings finished {tally.finished}, with another SHA-256: {len(tally.wrong)} (to be met: 0)")
    print(f"  took               {tally.seconds:.0f} s")


def _undisturbed(folder: Path) -> tuple[str, float]:
    folder.mkdir()
    began = time.monotonic()
    report, said = Attempt(folder, "one process", resume=False).result()
    if report is None:
        sys.exit(said)
    print(f"undisturbed: sha256 {report['parameters_sha256']}", flush=True)
    return str(report["parameters_sha256"]), time.monotonic() - began


def _one_training(folder: Path, expected: str, typical_s: float, chance: random.Random, times: int) -> Tally:
    """Begin a training and go on with it until it is done, killing it on the way."""
    folder.mkdir()
    tally, began = Tally(), time.monotonic()
    while True:
        resume = any(folder.glob("runs/*/checkpoints/step-*[0-9]"))
        attempt = Attempt(folder, chance.choice(list(LAYOUTS)), resume=resume)
        killed = tally.kills < times and _kill_sometime(attempt, typical_s, chance, tally)
        report, said = attempt.result()
        start = _start(attempt.run_folder)
        tally.resumed += start is not None
        tally.torn += start is not None and _is_torn(start)
        for reason in start["passed_over"] if start else []:
            _count(tally.passed_over, reason.rpartition("/")[2].partition(": ")[2])
        if report is None and not killed:
            sys.exit(f"an attempt ended by itself:\n{said}")
        if report is not None:
            tally.finished += 1
            tally.seconds = time.monotonic() - began
            if report["parameters_sha256"] != expected:
                tally.wrong.append(str(report["parameters_sha256"]))
            return tally


def _start(run: Path | None) -> dict[str, Any] | None:
    """What an attempt went on from, as its plan says; None if from nothing, or if it was killed before it had a plan."""
    with _suppressed():
        found: dict[str, Any] | None = json.loads(((run or Path("/nowhere")) / "plan.json").read_text())["start"]
        return found
    return None


def _is_torn(start: dict[str, Any]) -> bool:
    """Whether a file of the checkpoint is not what its manifest says, or there is none."""
    folder = Path(start["origin"])
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}
    expected = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    return found != expected or manifest["step"] != start["step"]


def _count(counter: dict[str, int], name: str) -> None:
    counter[name] = counter.get(name, 0) + 1


def _kill_sometime(attempt: Attempt, typical_s: float, chance: random.Random, tally: Tally) -> bool:
    """Wait for the moment, and kill; nobody is killed if the run is over before, and then the answer is no."""
    saving = chance.random() < 0.5
    skip, after_s = chance.randrange(8), chance.uniform(0, 0.03 if saving else typical_s)
    moments = _checkpoints_that_begin(attempt) if saving else iter(())
    for seen, _ in enumerate(moments):
        if seen == skip:
            break
    deadline = time.monotonic() + after_s
    while time.monotonic() < deadline and attempt.process.poll() is None:
        time.sleep(min(0.01, max(0.0, deadline - time.monotonic())))
    if attempt.process.poll() is not None:
        return False
    name, pids = chance.choice(list(attempt.victims().items()))
    for pid in pids:
        with _suppressed():
            os.kill(pid, signal.SIGKILL)
    tally.kills += 1
    tally.while_saving += saving
    _count(tally.victims, "a rank" if name.startswith("rank") else name)
    return True


def _checkpoints_that_begin(attempt: Attempt) -> Iterator[None]:
    was_saving = False
    while attempt.process.poll() is None:
        is_saving = attempt.is_saving()
        if is_saving and not was_saving:
            yield
        was_saving = is_saving
        time.sleep(0.001)


def _listed(counted: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counted.items(), key=lambda item: -item[1]))


if __name__ == "__main__":
    sys.exit(main())
