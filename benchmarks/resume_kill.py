"""Kill -9 at random moments, resume, and compare the bits: the end is always that of the run nobody disturbed.

    python benchmarks/resume_kill.py [--times 100] [--seed 0] [--folder DIR]

Each attempt is `ttlaunch run … --resume latest` in a layout drawn at random: one process, two tiers, three tiers, data
parallel, or a pipeline of two or four stages. Half of the kills come at a random moment of the attempt, the other half within a few
milliseconds of a checkpoint that has begun to appear. The victim is drawn too: a rank, mpirun, the launcher, or all at
once. When a training reaches its last step its SHA-256 is compared and the next training begins, until there were so
many kills; a checkpoint is made every 3 steps. Every checkpoint that a resume passed over is counted with its reason.
"""

import argparse
import collections
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    "two stages": ("pipeline_parallel", 2, "multihost_config: {pipeline_parallel_config: {blocks_per_rank: [2, 2]}}\n"),
    "four stages": (
        "pipeline_parallel",
        4,
        "multihost_config: {pipeline_parallel_config: {blocks_per_rank: [1, 1, 1, 1]}}\n",
    ),
}
LONGEST_S = 300.0


@dataclass
class Tally:
    """What has happened."""

    kills: int = 0
    while_saving: int = 0
    finished: int = 0
    resumed: int = 0
    wrong: list[str] = field(default_factory=list)
    passed_over: collections.Counter[str] = field(default_factory=collections.Counter)
    victims: collections.Counter[str] = field(default_factory=collections.Counter)


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
        found = {"launcher": [self.process.pid]}
        with _suppressed():
            path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
            found["mpirun"] = [int(Path(path).read_text().split()[0])]
        for path in sorted((self.run_folder or self._folder).glob("records/rank-*.progress.jsonl")):
            with _suppressed():
                found[path.name.split(".")[0]] = [json.loads(path.read_text().splitlines()[0])["pid"]]
        return found | {"all at once": [pid for pids in found.values() for pid in pids]}

    def result(self) -> tuple[dict[str, Any] | None, str]:
        """The report, if the run came to its end, and what it said."""
        from ttlaunch.launch.process import run_processes

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
    return {path for path in (folder / "runs").glob("*") if path.is_dir()}


def main() -> int:
    """Run, kill, resume, compare."""
    parser = argparse.ArgumentParser(description="Kill -9 at random moments, resume, compare the bits.")
    parser.add_argument("--times", type=int, default=100, help="kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="where runs are made")
    options = parser.parse_args()
    chance = random.Random(options.seed)  # noqa: S311 - nothing secret
    scratch = Path(tempfile.mkdtemp(prefix="resume-kill-", dir=options.folder))
    began, tally = time.monotonic(), Tally()
    try:
        expected, typical_s = _undisturbed(scratch / "undisturbed")
        while tally.kills < options.times:
            _one_training(scratch / f"training-{tally.finished}", expected, typical_s, chance, tally, options.times)
    finally:
        shutil.rmtree(scratch)
    print(f"{tally.kills} kills ({tally.while_saving} within milliseconds of a checkpoint that began to appear)")
    print(f"  victims            {_listed(tally.victims)}")
    print(f"  resumed            {tally.resumed} times from a checkpoint")
    print(f"  passed over        {_listed(tally.passed_over) or 'none'}")
    print(f"  trainings finished {tally.finished}, with another SHA-256: {len(tally.wrong)}")
    print(f"  took               {time.monotonic() - began:.0f} s")
    return 1 if tally.wrong else 0


def _undisturbed(folder: Path) -> tuple[str, float]:
    folder.mkdir()
    began = time.monotonic()
    report, said = Attempt(folder, "one process", resume=False).result()
    if report is None:
        sys.exit(said)
    print(f"undisturbed: sha256 {report['parameters_sha256']}", flush=True)
    return str(report["parameters_sha256"]), time.monotonic() - began


def _one_training(
    folder: Path, expected: str, typical_s: float, chance: random.Random, tally: Tally, times: int
) -> None:
    """Begin a training and go on with it until it is done, killing it on the way."""
    folder.mkdir()
    while True:
        resume = any(folder.glob("runs/*/checkpoints/step-*[0-9]"))
        attempt = Attempt(folder, chance.choice(list(LAYOUTS)), resume=resume)
        killed = tally.kills < times and _kill_sometime(attempt, typical_s, chance, tally)
        report, said = attempt.result()
        tally.resumed += resume
        for reason in report["began_from"]["passed_over"] if report is not None and resume else []:
            tally.passed_over[reason.rpartition("/")[2].partition(": ")[2]] += 1
        if report is None and not killed:
            sys.exit(f"an attempt ended by itself:\n{said}")
        if report is not None:
            tally.finished += 1
            if report["parameters_sha256"] != expected:
                tally.wrong.append(str(report["parameters_sha256"]))
            print(f"kill {tally.kills}: training {tally.finished} gave {report['parameters_sha256'][:16]}…", flush=True)
            return


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
    tally.victims["a rank" if name.startswith("rank") else name] += 1
    return True


def _checkpoints_that_begin(attempt: Attempt) -> Iterator[None]:
    was_saving = False
    while attempt.process.poll() is None:
        is_saving = attempt.is_saving()
        if is_saving and not was_saving:
            yield
        was_saving = is_saving
        time.sleep(0.001)


def _listed(counted: collections.Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counted.most_common())


if __name__ == "__main__":
    sys.exit(main())
