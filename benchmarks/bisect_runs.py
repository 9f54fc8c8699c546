"""Which causes `bisect` finds, and which flipped bits: `PYTHONPATH=. python benchmarks/bisect_runs.py [--steps 1000] [--causes 25] [--flips 25]`.

Each case is a pair of runs of `data_parallel` on two ranks: one good run for all, and one with a random change. All ranks train in this process,
with the bits of a run.

Causes that repeat: a line of the recipe that changes the inputs of one micro-batch in one step; a key of the configuration; another text. To be met: the
cause, the step, and for a line the layer and the micro-batch are right in all, with at most two passes over each run.

Flips: one bit of a parameter of one rank, after the update of a random step. To be met: all are named as hardware, with the run, the rank, and an interval
between digests that has the step.

The same command goes on after the last case, see `kept_trials.py`.
"""

import argparse
import random
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kept_trials import Row, add_options, exit_status, make_missing, open_folder

from tests.lab.recorded_runs import record_run
from tests.runtime.flips import flipping
from ttlaunch.app.dialogue import Unattended
from ttlaunch.lab.bisect import bisect
from ttlaunch.lab.replay import prepare_replay
from ttlaunch.lab.repro import read_origin_of

RECIPES = Path(__file__).parents[1] / "recipes"
LINE = "        return differentiate(model, x_BT, y_BT, masks=model.masks(step, index), before_backward=before)\n"
"""The line of the recipe before which a cause in its code is put."""
TENSORS = (
    "embedding.token.weight",
    "blocks.0.attention_in.weight",
    "blocks.1.feed_forward_out.weight",
    "head.output.weight",
)
KEYS = {"training_config.weight_decay": 0.3, "training_config.beta1": 0.8, "training_config.learning_rate": 0.002}
MICRO_BATCHES = 4


def main() -> int:
    """Make the cases that are missing, and say how many were right; status 1 if one was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--causes", type=int, default=25)
    parser.add_argument("--flips", type=int, default=25)
    add_options(parser, folder=".benchmarks/bisect")
    given = parser.parse_args()
    folder = open_folder(given)
    pairs = Pairs(folder, given.steps)
    makes = {"cause": pairs.cause, "flip": pairs.flip}
    wanted = {
        f"{kind} {case}": partial(_case, kind, case, makes[kind])
        for kind, count in (("cause", given.causes), ("flip", given.flips))
        for case in range(count)
    }
    made = make_missing(wanted, folder, for_s=given.for_s)
    for kind in makes:
        rows = [one for one in made if one["kind"] == kind]
        passes = max((one["passes"] for one in rows), default=0)
        print(
            f"{kind}s: {sum(one['right'] for one in rows)} of {len(rows)} right, with at most {passes} passes over each run"
        )
    return exit_status(are_met=all(one["right"] for one in made), made=len(made), wanted=len(wanted))


def _case(kind: str, case: int, make: Callable[[int], Row]) -> Row:
    return {"kind": kind, "case": case, **make(case)}


class Pairs:
    """Makes pairs of runs, and compares what `bisect` says with what was changed."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._runs, self._steps = folder, folder / "runs", steps
        self._keys = {
            "training_config.steps": steps,
            "training_config.verify_interval": 20,
            "training_config.validation_interval": steps,
            "checkpoint_config.interval": 100,
            "checkpoint_config.keep": None,
        }
        self._recipe = folder / "recipes/pair"
        if not self._recipe.is_dir():
            shutil.copytree(RECIPES / "data_parallel", self._recipe, ignore=shutil.ignore_patterns("__pycache__"))
        self._text = (RECIPES / "data_parallel/trainer.py").read_text(encoding="utf-8")
        if self._text.count(LINE) != 1:
            raise SystemExit(
                f"recipes/data_parallel/trainer.py has not one line `{LINE.strip()}`: no cause can be put before it"
            )
        self._write(self._text)
        self._good = self._good_run()

    def _good_run(self) -> Path:
        """Return the run that an earlier call made, or make it; runs that an interrupted case has left are removed."""
        note = self._folder / f"good-{self._steps}.txt"
        good = self._runs / note.read_text(encoding="utf-8") if note.exists() else self._record()
        note.write_text(good.name, encoding="utf-8")
        for other in self._runs.iterdir():
            if other.is_dir() and not other.is_symlink() and other != good:
                shutil.rmtree(other)
        return good

    def _write(self, text: str) -> None:
        (self._recipe / "trainer.py").write_text(text, encoding="utf-8")

    def _record(self, *, changed: dict[str, Any] | None = None, during: Any = None) -> Path:
        keys = {**self._keys, **(changed or {})}
        path: Path = record_run(self._recipe, self._runs, changed=keys, during=during)
        return path

    def _compared(self, other: Path) -> Any:
        dialogue = Unattended()
        found = bisect(*(prepare_replay(read_origin_of(run), dialogue) for run in (self._good, other)))
        shutil.rmtree(other)
        return found

    def cause(self, case: int) -> dict[str, Any]:
        """Change one thing that repeats."""
        draw = random.Random(f"cause {case}")  # noqa: S311 - no secret
        kind = ("code", "code", "code", "configuration", "data")[case % 5]
        step, micro_batch = draw.randrange(1, self._steps + 1), draw.randrange(MICRO_BATCHES)
        wanted: tuple[Any, ...]
        if kind == "code":
            change = f"        x_BT = x_BT.flip(1) if (step, index) == ({step}, {micro_batch}) else x_BT\n"
            self._write(self._text.replace(LINE, change + LINE))
            other = self._record()
            self._write(self._text)
            wanted = ("code", step, "activation", "embedding", micro_batch)
        elif kind == "configuration":
            key = draw.choice(sorted(KEYS))
            other = self._record(changed={key: KEYS[key]})
            # With another beta1 the first means differ by a factor that the first update divides by again: 2, which rounds nothing.
            moment = "optimizer.mean." if key.endswith(".beta1") else ""
            wanted = ("configuration", 1, "update", f"{moment}embedding.token.weight", None)
        else:
            path = self._folder / f"text-{case}.txt"
            path.write_text("".join(draw.choice("abcdefgh \n") for _ in range(20_000)), encoding="utf-8")
            other = self._record(changed={"training_config.data_path": str(path)})
            wanted = ("data", 1, "inputs", None, 0)
        found = self._compared(other)
        parting = found.parting
        said = (found.verdict, *((parting.step, parting.what, parting.name, parting.micro_batch) if parting else ()))
        return {"wanted": wanted, "said": said, "passes": found.passes, "right": said == wanted and found.passes <= 2}

    def flip(self, case: int) -> dict[str, Any]:
        """Flip a bit of a parameter of one rank."""
        draw = random.Random(f"flip {case}")  # noqa: S311 - no secret
        step, rank, tensor = draw.randrange(1, self._steps), draw.randrange(2), draw.choice(TENSORS)
        other = self._record(during=flipping(rank, tensor, draw, step=step))
        found = self._compared(other)
        said = [(one.run == other.name, one.after, one.step) for one in found.contradictions]
        right = found.verdict == "hardware" and len(said) == 1 and said[0][0] and said[0][1] <= step <= said[0][2]
        return {"wanted": (rank, tensor, step), "said": (found.verdict, *said), "passes": found.passes, "right": right}


if __name__ == "__main__":
    sys.exit(main())
