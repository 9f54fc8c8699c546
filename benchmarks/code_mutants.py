"""Mutate the numerics and the reading of recipes at random, and count the mutants that no fast test notices.

mutmut makes the mutants of every function without a decorator, runs under each one the tests that call the function, and
forks for it, so that torch is imported once. What survives is judged again in a process that imports the package with the
mutant active. The sample follows from the seed and the mutants' names. Two kinds of mutants are left out: other text in a
sentence for people (its wording may change), and functions that only ranks under mpirun call (`benchmarks/communicators.py`
and `tests/mpi` run those).

    pip install -e '.[train,dev,mutants]'
    python benchmarks/code_mutants.py [--count 400] [--seed 0] [--folder /tmp/ttlaunch-mutants] [--again] [--batch 80]

Kill it whenever you like: it goes on where it was, batch by batch in the order of the sample, so that the first batches are
a smaller sample. A changed function is judged anew; `--again` judges survivors anew, after tests have been written for
them. Survivors have their reasons in `code_mutants.yaml`.

Ends with 1 if more than 5 % survive, or if a survivor has no reason there.
"""

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
REASONS = Path(__file__).with_suffix(".yaml")
MOST_SURVIVORS = 0.05
MUTATED = [
    "ttlaunch/runtime/training/*.py",
    "ttlaunch/runtime/model/*.py",
    "ttlaunch/runtime/data/*.py",
    "ttlaunch/runtime/comm/*.py",
    "ttlaunch/spec/recipe/*.py",
]
OVER_MPIRUN = ("ttlaunch.runtime.comm.mpi.", "ttlaunch.runtime.comm.fabric.", "ttlaunch.runtime.comm.torch_group.")
# Tests of techniques that call all of this code and take longest, what they find the others do; and one of docstrings,
# which mutmut takes away.
SLOW = (
    "bucketed_exchange",
    "messages_are_documented",
    "pipeline_memory",
    "resume_layouts",
    "staleness_protocol",
    "weights",
    "zero",
    "zero_resume",
)
# Without `simulate`: it starts a process that looks for the recipe's line in frames, among which mutmut's would be.
CLI = ("bad_drift", "bad_input", "data", "plan", "recipes", "schema", "show", "validate_file")
TESTS = [
    "tests/runtime",
    "tests/spec/recipe",
    "tests/recipes",
    "tests/planning",
    *(f"tests/cli/test_{name}.py" for name in CLI),
]
# Tests of other environments start other processes, which know nothing of a mutant; mutmut takes microseconds itself.
ARGUMENTS = [
    "-m",
    "not mpi and not slow and not cluster",
    "-k",
    "not mpirun and not installed and not packages_of and not microseconds",
    *(f"--ignore=tests/runtime/test_{name}.py" for name in SLOW),
]
SETTINGS = f"""
[tool.mutmut]
source_paths = ["ttlaunch/"]
only_mutate = {json.dumps(MUTATED)}
also_copy = ["recipes", "configurations", "docs", "benchmarks", "README.md", "CHANGELOG.md", "constraints.txt", ".ci"]
pytest_add_cli_args_test_selection = {json.dumps(TESTS)}
pytest_add_cli_args = {json.dumps(["-p", "code_mutants_frames", *ARGUMENTS, "--timeout=60"])}
timeout_constant = 30
timeout_multiplier = 4
use_git_change_detection = false
track_dependencies = false
"""
AFRESH = "TTLAUNCH_MUTANTS_AFRESH"
SURVIVED, NO_TESTS = (0,), (5, 33)
TIMED_OUT = (-24, 24, 36, 152, 255)
SENTENCE = re.compile(r"[A-Za-z]+ +[A-Za-z{]+")


@dataclass(frozen=True)
class Mutant:
    """One change of one function.

    Attributes:
        name: Module, function and number, as mutmut has them.
        path: The file that is changed.
        status: The exit status of its tests; None: not run yet.
        folder: The copy that it is in.
    """

    name: str
    path: Path
    status: int | None
    folder: Path

    @property
    def has_survived(self) -> bool:
        return self.status in {*SURVIVED, *NO_TESTS}

    @property
    def is_left_out(self) -> bool:
        """Whether it is of a kind that the sample does not have."""
        return self.name.startswith(OVER_MPIRUN) or _is_other_wording(self.was, self.became)

    @property
    def key(self) -> tuple[str, str, str]:
        """What stays the same when other lines of the function change."""
        return self.name.partition("__mutmut_")[0], self.was, self.became

    @property
    def was(self) -> str:
        return self._changed[0]

    @property
    def became(self) -> str:
        return self._changed[1]

    @functools.cached_property
    def _changed(self) -> tuple[str, str]:
        from mutmut.mutation.diff_apply import get_diff_for_mutant

        with contextlib.chdir(self.folder):
            lines = get_diff_for_mutant(self.name, path=self.path).splitlines()[2:]
        gone, come = ([line[1:].strip() for line in lines if line.startswith(sign)] for sign in "-+")
        return " ".join(gone), " ".join(come)


def _is_other_wording(was: str, became: str) -> bool:
    """Whether only the text of a string with several words differs."""
    plain = [text.replace("XX", "").lower() for text in (was, became)]
    return plain[0] == plain[1] and any(SENTENCE.search(text) for text in re.findall(r'"[^"]*"', was))


def main() -> int:
    """Judge what is left of the sample, then print the figure and its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--batch", type=int, default=80, help="how many mutants are judged together, in the sample's order"
    )
    in_temp = Path(tempfile.gettempdir()) / "ttlaunch-mutants"
    parser.add_argument("--folder", type=Path, default=in_temp, help="kept between calls")
    parser.add_argument("--again", action="store_true", help="run the tests of survivors again")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    copy_checkout(folder)
    # One small function: mutmut then makes all mutants and learns which test calls what.
    if run_mutmut(folder, ["ttlaunch.runtime.model.losses.x_perplexity__mutmut_1"]):
        return 2
    sample = choose(all_mutants(folder), count=options.count, seed=options.seed)
    afresh = Afresh(folder)
    left = [one for one in sample if one.status is None or (one.has_survived and (options.again or one not in afresh))]
    for start in range(0, len(left), options.batch):
        if judge(folder, [one.name for one in left[start : start + options.batch]], afresh):
            return 2
    sample = choose(all_mutants(folder), count=options.count, seed=options.seed)
    return report(sample, yaml.safe_load(REASONS.read_text(encoding="utf-8")) or [])


def copy_checkout(folder: Path) -> None:
    """Bring the copy to the state of the checkout; only files that differ are written, since mutmut goes by their times."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    mutants = folder / "mutants"
    for path in [*folder.glob("[a-z]*/**/*"), *mutants.glob("[a-z]*/**/*")]:
        name = str(path.relative_to(mutants if mutants in path.parents else folder)).removesuffix(".meta")
        if path.is_file() and path.suffix in {".py", ".meta", ".md", ".yaml", ".txt"} and name not in names:
            path.unlink()
    for name in sorted(names):
        data = (ROOT / name).read_bytes()
        if name == "pyproject.toml":
            data += SETTINGS.encode()
        copy = folder / name
        if not copy.is_file() or copy.read_bytes() != data:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(data)
            if copy.suffix != ".py":
                (mutants / name).unlink(missing_ok=True)


class Afresh:
    """The names of the survivors whose tests have run in a process that imported everything with the mutant active."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "afresh.json"
        self._names = set(json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else [])

    def __contains__(self, mutant: Mutant) -> bool:
        return mutant.name in self._names

    def remove(self, names: Iterable[str]) -> None:
        self._keep(self._names - set(names))

    def add(self, names: Iterable[str]) -> None:
        self._keep(self._names | set(names))

    def _keep(self, names: set[str]) -> None:
        self._names = names
        self._path.write_text(json.dumps(sorted(names)), encoding="utf-8")


def judge(folder: Path, names: list[str], afresh: Afresh) -> int:
    """Run the tests of these mutants in processes that have imported everything, then survivors' in ones that import anew.

    The second way finds what a mutant changes on import, and takes seconds longer for each mutant.
    """
    afresh.remove(names)
    if status := run_mutmut(folder, names):
        return status
    survivors = [one.name for one in all_mutants(folder) if one.name in names and one.has_survived]
    status = run_mutmut(folder, survivors, {AFRESH: "1"}) if survivors else 0
    if not status:
        afresh.add(survivors)
    return status


def run_mutmut(folder: Path, names: list[str], variables: Mapping[str, str] | None = None) -> int:
    """Run the tests of these mutants; mutmut keeps each result as it comes.

    Processes that tests start import the copy, too.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"} | {
        **(variables or {})
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(folder / "mutants"), str(folder / "benchmarks")])
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", "1", *names]
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def all_mutants(folder: Path) -> list[Mutant]:
    """Every mutant in the copy, with what became of it so far."""
    found = []
    for meta in sorted((folder / "mutants" / "ttlaunch").rglob("*.py.meta")):
        path = meta.relative_to(folder / "mutants").with_suffix("")
        statuses = json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"]
        found += [Mutant(name, path, status, folder) for name, status in statuses.items()]
    return found


def choose(mutants: list[Mutant], *, count: int, seed: int) -> list[Mutant]:
    """A sample in which a mutant's place depends on its own name alone, so that it outlives changes elsewhere."""
    judged = (one for one in sorted(mutants, key=lambda one: _draw(seed, one.name)) if not one.is_left_out)
    return list(itertools.islice(judged, count))


def _draw(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}/{name}".encode()).digest()


def report(sample: list[Mutant], reasons: list[dict[str, str]]) -> int:
    """Print what became of the sample; 1 if too many survived, or one of them without a reason."""
    why = {(one["function"], one["was"], one["became"]): one["why"] for one in reasons}
    survivors = [one for one in sample if one.has_survived]
    unexplained = [one for one in survivors if one.key not in why]
    for one in survivors:
        sys.stdout.write(f"\n{one.name}\n  - {one.was}\n  + {one.became}\n  {why.get(one.key, 'NO REASON')}\n")
    modules = Counter(".".join(one.name.split(".")[1:3]) for one in sample)
    for module, count in sorted(modules.items()):
        alive = sum(one.has_survived and one.name.startswith(f"ttlaunch.{module}.") for one in sample)
        sys.stdout.write(f"{module:24} {count:5} mutants {alive:4} survived\n")
    timed_out = sum(one.status in TIMED_OUT for one in sample)
    share = len(survivors) / len(sample)
    sys.stdout.write(
        f"{len(sample)} mutants, {timed_out} of them ended by the time limit, {share:.1%} survived "
        f"(at most {MOST_SURVIVORS:.0%}), {len(unexplained)} without a reason\n"
    )
    return int(share > MOST_SURVIVORS or bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())
