"""Edit every shipped description at random, one edit each, and count the mistakes that are accepted in silence.

Every accepted mutant must give an equal plan, or a warning, or be one of the listed kinds of a description that is as
right (`mutation_kinds.py`); all others have slipped through and are printed. Each mutant is made from its number alone.

    python benchmarks/mutation.py [--count 1000] [--seed 0]

Ends with 1 if more than 1 % slipped through, or if one gave an exception.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from mutation_edits import edit
from mutation_kinds import kinds_of_config, kinds_of_topology

from ttlaunch.app.check_data import check_data
from ttlaunch.diagnostics import Diagnostic, Source, has_errors
from ttlaunch.engines.openmpi import OpenMpi, generation_of
from ttlaunch.planning.launch_plan import CommandProgram, LaunchPlan
from ttlaunch.planning.make import Surroundings, plan_command
from ttlaunch.planning.recipe_plan import RecipeChoice, check_recipe, plan_recipe
from ttlaunch.spec.recipe.config import load_config, render_commented
from ttlaunch.spec.recipe.declare import Recipe
from ttlaunch.spec.recipe.discovery import find_recipe, load_recipe
from ttlaunch.spec.recipe.importing import import_recipe_module
from ttlaunch.spec.topology.convert import convert
from ttlaunch.spec.topology.load import load_topology
from ttlaunch.spec.topology.model import Topology

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {"HOME": "/home/ann", "PATH": "/usr/bin"}
SURROUNDINGS = Surroundings(
    Path("/home/ann"), ENVIRONMENT, "python", "shim.py", OpenMpi("mpirun", (5, 0, 11), generation_of((5, 0, 11)))
)
MOST_SLIPPED = 0.01


@dataclass(frozen=True)
class Subject:
    """A description whose files are edited.

    Attributes:
        files: Name to text, of the files that are edited.
        recipe: The recipe whose training file is edited; None: the files of a cluster are.
        on: The cluster on which the recipe is laid out.
    """

    name: str
    files: dict[str, str]
    recipe: str | None = None
    on: str = ""


@dataclass
class Tally:
    """What became of the mutants of one subject."""

    counts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    slipped: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """What a description means; `plan` is None if it is refused."""

    plan: LaunchPlan | None
    topology: Topology | None
    diagnostics: list[Diagnostic]


def subjects() -> Iterator[Subject]:
    """Every shipped configuration, each descriptor in its other version too, and every recipe's training file."""
    for folder in sorted((ROOT / "configurations").iterdir()):
        files = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())}
        yield Subject(folder.name, files)
        if "mgd.yaml" in files:
            text = convert(Source("mgd.yaml", files.pop("mgd.yaml")), to="textproto").text
            files["rank_bindings.yaml"] = files["rank_bindings.yaml"].replace("mgd.yaml", "mgd.textproto")
            yield Subject(f"{folder.name} with a textproto", files | {"mgd.textproto": str(text)})
    for path in sorted((ROOT / "recipes").glob("*/train.yaml")):
        recipe = import_recipe_module(path.parent, "recipe").RECIPE
        text = render_commented(recipe, load_config(recipe, path))  # the file has few keys; mutate all that there are
        yield Subject(path.parent.name, {"train.yaml": text}, path.parent.name, "local")
        if "worker" in text and path.parent.name.startswith("hierarchical"):
            bound = text.replace("num_workers: 2", "num_workers: 3")
            yield Subject(f"{path.parent.name} on 5loudboxes", {"train.yaml": bound}, path.parent.name, "5loudboxes")


class Reader:
    """Reads descriptions in one folder, in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._recipes: dict[str, Recipe] = {}
        self._clusters: dict[str, Topology | None] = {}

    def read(self, subject: Subject, files: dict[str, str]) -> Outcome:
        """Check and plan one description."""
        if subject.recipe is None:
            return self._read_cluster(files)
        return self._read_training(subject, files["train.yaml"])

    def _read_cluster(self, files: dict[str, str]) -> Outcome:
        for path in self.folder.iterdir():
            path.unlink()
        for name, text in files.items():
            (self.folder / name).write_text(text, encoding="utf-8")
        loaded = load_topology(self.folder, name="lab", environment=ENVIRONMENT, working_folder=self.folder)
        plan = (
            plan_command(CommandProgram("work", ("work",)), loaded.topology, SURROUNDINGS, ranks=None)
            if loaded.topology
            else None
        )
        mistakes = [plan] if isinstance(plan, Diagnostic) else []
        found = [*loaded.diagnostics, *mistakes]
        return Outcome(plan if isinstance(plan, LaunchPlan) else None, loaded.topology, found)

    def _read_training(self, subject: Subject, text: str) -> Outcome:
        name = str(subject.recipe)
        if name not in self._recipes:
            found_recipe = find_recipe(name, working_folder=ROOT)
            assert not isinstance(found_recipe, Diagnostic)
            recipe = load_recipe(found_recipe)
            assert isinstance(recipe, Recipe)
            self._recipes[name] = recipe
        if subject.on not in self._clusters:
            folder = ROOT / "configurations" / subject.on
            loaded = load_topology(folder, name="lab", environment=ENVIRONMENT, working_folder=ROOT)
            self._clusters[subject.on] = loaded.topology
        topology = self._clusters[subject.on]
        assert topology is not None
        loaded_config = load_config(self._recipes[name], None, name="train.yaml", standard_input=text.encode())
        choice = RecipeChoice(name, ROOT / "recipes" / name, self._recipes[name], loaded_config)
        layout, mistakes = check_recipe(choice, topology, ranks=None)
        found = [*loaded_config.diagnostics, *mistakes]
        training = getattr(loaded_config.config, "training_config", None)
        if training is not None and training.data_path is not None:
            found += [mistake for mistake in [check_data(loaded_config, ROOT)[1]] if mistake]
        plan = (
            plan_recipe(choice, layout, topology, surroundings=SURROUNDINGS)
            if layout and not has_errors(found)
            else None
        )
        return Outcome(plan, None, found)


def mutate(subject: Subject, number: int, seed: int) -> tuple[dict[str, str], str] | None:
    """The files after the edit of this number, and the edit in words."""
    random_ = random.Random(f"{seed}/{subject.name}/{number}")  # noqa: S311 - to be repeatable is the point
    names = sorted(subject.files)
    name = random_.choices(names, [len(subject.files[name]) for name in names])[0]
    edited = edit(subject.files[name], random_)
    return None if edited is None else ({**subject.files, name: edited[0]}, f"{name}, {edited[1]}")


def judge(before: Outcome, after: Outcome) -> tuple[str, set[str]]:
    """What became of a mutant: refused, equal, warned, as right (with its kinds), or slipped."""
    if after.plan is None:
        return ("refused" if has_errors(after.diagnostics) else "slipped"), set()
    assert before.plan is not None
    if before.topology is not None and after.topology is not None:
        kinds = kinds_of_topology(before.topology, after.topology)
    else:
        a, b = before.plan.program, after.plan.program
        kinds = kinds_of_config(getattr(a, "config", {}), getattr(b, "config", {}))
    same_plan = before.plan.hash == after.plan.hash
    if kinds == set() and same_plan:
        return "equal", set()
    if any(diagnostic not in before.diagnostics for diagnostic in after.diagnostics):
        return "warned", set()
    return ("as right", kinds) if kinds else ("slipped", set())


def run(subject: Subject, *, count: int, seed: int, reader: Reader) -> Tally:
    """Judge `count` mutants of one subject."""
    tally = Tally()
    before = reader.read(subject, subject.files)
    assert before.plan is not None, [diagnostic.message for diagnostic in before.diagnostics]
    number = 0
    while sum(tally.counts.values()) < count:
        number += 1
        mutant = mutate(subject, number, seed)
        if mutant is None:
            continue
        files, words = mutant
        try:
            verdict, kinds = judge(before, reader.read(subject, files))
        except Exception as error:  # noqa: BLE001 - to find them is the point
            verdict, kinds = "exception", set()
            tally.broken.append(f"{subject.name}, mutant {number}: {words}: {type(error).__name__}: {error}")
        tally.counts[verdict] += 1
        tally.kinds.update(kinds)
        if verdict == "slipped":
            tally.slipped.append(f"{subject.name}, mutant {number}: {words}")
    return tally


def main() -> int:
    """Run all subjects and print what became of the mutants."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="mutants of each description")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    verdicts = ("refused", "equal", "warned", "as right", "slipped", "exception")
    total, started = Tally(), perf_counter()
    sys.stdout.write(f"{'':40}{''.join(f'{verdict:>10}' for verdict in verdicts)}\n")
    with tempfile.TemporaryDirectory() as folder:
        reader = Reader(Path(folder).resolve())
        for subject in subjects():
            tally = run(subject, count=options.count, seed=options.seed, reader=reader)
            sys.stdout.write(f"{subject.name:40}{''.join(f'{tally.counts[verdict]:10}' for verdict in verdicts)}\n")
            total.counts += tally.counts
            total.kinds += tally.kinds
            total.slipped += tally.slipped
            total.broken += tally.broken
    made = sum(total.counts.values())
    sys.stdout.write(f"{'all':40}{''.join(f'{total.counts[verdict]:10}' for verdict in verdicts)}\n\n")
    sys.stdout.writelines(f"{count:6}  {kind}\n" for kind, count in total.kinds.most_common())
    sys.stdout.writelines(f"slipped: {line}\n" for line in total.slipped)
    sys.stdout.writelines(f"exception: {line}\n" for line in total.broken)
    share = total.counts["slipped"] / made
    sys.stdout.write(f"\n{made} mutants, {share:.2%} slipped through, {perf_counter() - started:.1f} s\n")
    return int(share > MOST_SLIPPED or bool(total.broken))


if __name__ == "__main__":
    sys.exit(main())
