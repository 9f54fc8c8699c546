"""Find where two runs part: the first step, tensor, layer and micro-batch with other bits, and the cause.

Two passes over each run are enough. The recorded digests give an interval. The first pass computes both runs again in this interval, with
digests of every step: it finds the step, and whether each run agrees with its own replay. The second pass computes this one step again with
everything in it described: it finds the micro-batch and the layer.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ttlaunch import contract
from ttlaunch.diagnostics import Diagnostic, LaunchError, shown
from ttlaunch.lab.replay import Prepared, Replay, replay_steps
from ttlaunch.planning.resume import find_changes
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.replay import NamedTensor, PassTensor, ReplayEnd, ReplayOrder
from ttlaunch.running.readers.repeat import changed_versions
from ttlaunch.running.readers.step_digests import Mismatch, compare_steps
from ttlaunch.running.runs.files import read_object_if_any
from ttlaunch.running.runs.record_inputs import cpu_class
from ttlaunch.spec.recipe.importing import import_recipe_module

_LONGEST = 200
_MOST_LINES = 3
_PYTHON = {".py", ".yaml"}

SAME, CONFIGURATION, CODE, DATA, LIBRARIES, CPU, START, LAYOUT, HARDWARE, UNKNOWN = (
    *("same", "configuration", "code", "data", "libraries", "cpu", "start", "layout", "hardware", "unknown"),
)
"""What a difference can come from."""


@dataclass(frozen=True)
class Cause:
    """A difference between two runs, besides their bits.

    Attributes:
        kind: One of the constants of this module.
        text: The difference, for a user.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Parting:
    """The first thing that two runs compute differently.

    Attributes:
        step: The step.
        what: `weights` before any step, `inputs`, `activation`, `gradient` of a micro-batch, `gradients` of the update, or `update`.
        name: The layer of an activation, or the tensor; None for inputs.
        micro_batch: The micro-batch; None for what follows from all of them.
        tensors: The tensors with other bits after the step, in the order of the model.
    """

    step: int
    what: str
    name: str | None
    micro_batch: int | None
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Contradiction:
    """A run that its own replay contradicts.

    Attributes:
        run: The run.
        after: The last step whose digests are those of the replay.
        step: The first step at which something is not.
        ranks: The ranks whose digests are contradicted; empty if only numbers are.
        tensors: The tensors.
    """

    run: str
    after: int
    step: int
    ranks: tuple[int, ...]
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Bisection:
    """Where and why two runs part.

    Attributes:
        runs: Both runs.
        verdict: The cause: that of `causes` if there is one only, or `hardware`, `same` or `unknown`.
        last_equal: The last step of which both runs recorded equal digests; None if there is none.
        first_different: The first step at which they recorded anything different; None if all is equal.
        parting: Where their replays part; None if they do not.
        contradictions: The runs that their own replays contradict.
        causes: All that is different between the runs and can change bits.
        passes: How many passes each run was computed again in.
    """

    runs: tuple[str, str]
    verdict: str
    last_equal: int | None
    first_different: int | None
    parting: Parting | None = None
    contradictions: tuple[Contradiction, ...] = ()
    causes: tuple[Cause, ...] = ()
    passes: int = 0


def bisect(left: Prepared, right: Prepared) -> Bisection:
    """Find where two runs part, and why.

    Raises:
        LaunchError: One of them cannot be replayed, or nothing of them can be compared.
    """
    runs = left.origin.run_id, right.origin.run_id
    steps = range(min(left.last_step, right.last_step) + 1)
    recorded = compare_steps(left.recorded, right.recorded, steps)
    if not any((*recorded.tensors.values(), *recorded.numbers.values())) and not recorded.mismatches:
        message = (
            f"{runs[0]} and {runs[1]} recorded nothing that can be compared: they have no step or no tensor in common"
        )
        raise LaunchError([Diagnostic("P086", message)])
    causes = tuple(find_causes(left, right))
    first = recorded.first_mismatch
    if first is None:
        return Bisection(runs, SAME, recorded.last_proven, None, causes=causes)
    before = [step for step, count in recorded.tensors.items() if count and step < first]
    last_equal = max(before, default=None)
    if first == 0:
        names = tuple(one.name for one in recorded.mismatches if one.step == 0)
        parting = Parting(0, "weights", names[0] if names else None, None, names)
        return Bisection(runs, _verdict(causes), None, 0, parting, causes=causes)

    return _computed_again((left, right), Bisection(runs, UNKNOWN, last_equal, first, causes=causes))


def _computed_again(pair: tuple[Prepared, Prepared], known: Bisection) -> Bisection:
    """Compute two runs again between their last equal digests and their first difference, and then the step at which they part.

    Raises:
        LaunchError: A replay failed before it came to the first difference.
    """
    last, since = known.first_different or 0, known.last_equal or 0
    digests = ReplayOrder(step=last, shown=False, digests=True)
    replays = [replay_steps(one, order=digests, not_after=since) for one in pair]
    for one in replays:
        if one.fell_short:
            message = f"the replay of {one.run} failed before step {last}: {shown(one.ended, longest=_LONGEST)}"
            raise LaunchError([Diagnostic("P086", message)])
    contradictions = tuple(_contradictions(replays))
    if contradictions:
        elsewhere = tuple(_conditions(pair, contradictions))
        verdict = _verdict(elsewhere) if elsewhere else HARDWARE
        causes = elsewhere or known.causes
        return replace(known, verdict=verdict, contradictions=contradictions, causes=causes, passes=1)
    # Where each began at a checkpoint of its own, both have the digests from the later one on.
    both = range(max(one.began for one in replays), last + 1)
    mismatches = compare_steps(replays[0].recorded, replays[1].recorded, both).mismatches
    wrong = [one for one in mismatches if one.kind == "tensor"] or list(mismatches)
    if not wrong:
        return replace(known, passes=1)
    step = min(one.step for one in wrong)
    order = ReplayOrder(step=step, shown=True, digests=False)
    sides = [replay_steps(one, order=order).shown for one in pair]
    parting = _parting(step, wrong, sides)
    return replace(known, verdict=_verdict(known.causes, parting), parting=parting, passes=2)


def _contradictions(replays: Iterable[Replay]) -> Iterator[Contradiction]:
    for one in replays:
        step = one.agreement.first_mismatch
        if step is None:
            continue
        # A flip between two digests may first be seen in a loss, whose step has none.
        wrong = one.agreement.mismatches
        tensors = [each for each in wrong if each.kind == "tensor"]
        first = [each for each in tensors if each.step == min(one.step for one in tensors)]
        before = [at for at, count in one.agreement.tensors.items() if count and at < step]
        yield Contradiction(
            one.run,
            max(before, default=one.began),
            step,
            tuple(sorted({rank for each in first for rank in each.ranks})),
            tuple(each.name for each in first),
        )


def _conditions(pair: Iterable[Prepared], contradictions: Sequence[Contradiction]) -> Iterator[Cause]:
    """Yield what is different here from the runs that their replays contradict: it may be the cause, so the hardware need not be."""
    contradicted = {one.run for one in contradictions}
    for prepared in pair:
        run = prepared.origin.run_id
        if run not in contradicted:
            continue
        for change in changed_versions(prepared.origin):
            yield Cause(LIBRARIES, f"{run}: {change}")
        before, now = _environment(prepared).get("cpu"), cpu_class()
        if before is not None and before != now:
            yield Cause(CPU, f"{run} ran with {shown(before)}, this machine has {now}")


def _verdict(causes: Sequence[Cause], parting: Parting | None = None) -> str:
    """Return the kind of the causes if it is one only; of several, the one that explains other inputs, if they are what differs."""
    kinds = list(dict.fromkeys(one.kind for one in causes if one.kind != LAYOUT))
    if parting is not None and parting.what == "inputs" and DATA in kinds:
        return DATA
    return kinds[0] if len(kinds) == 1 else UNKNOWN


def find_causes(left: Prepared, right: Prepared) -> Iterator[Cause]:
    """Yield all that is different between two runs and can change bits."""
    plans = [read_object_if_any(one.origin.folder / contract.PLAN_FILE) for one in (left, right)]
    yield from _configuration(left, plans)
    yield from _code(left, right)
    texts = [(one.origin.data or {}).get("sha256") for one in (left, right)]
    if texts[0] != texts[1]:
        yield Cause(DATA, f"the training text: SHA-256 {str(texts[0])[:12]} → {str(texts[1])[:12]}")
    versions = [one.origin.versions for one in (left, right)]
    for name in sorted(versions[0].keys() | versions[1].keys()):
        if versions[0].get(name) != versions[1].get(name):
            yield Cause(LIBRARIES, f"{shown(name)}: {_said(versions[0].get(name))} → {_said(versions[1].get(name))}")
    cpus = [_environment(one).get("cpu") for one in (left, right)]
    if cpus[0] != cpus[1] and None not in cpus:
        yield Cause(CPU, f"vector instructions: {_said(cpus[0])} → {_said(cpus[1])}")
    starts = [one.origin.resume for one in (left, right)]
    if (starts[0] is None) != (starts[1] is None):
        yield Cause(START, f"began from: {_said(starts[0])} → {_said(starts[1])}")
    layouts = [(plan.get("layout"), plan.get("world_size")) for plan in plans]
    if layouts[0] != layouts[1]:
        yield Cause(
            LAYOUT, f"ranks: {layouts[0][1]} ({_said(layouts[0][0])}) → {layouts[1][1]} ({_said(layouts[1][0])})"
        )


def _configuration(left: Prepared, plans: Sequence[Mapping[str, Any]]) -> Iterator[Cause]:
    model = import_recipe_module(left.program, "recipe").RECIPE.config
    before, now = (plan.get("config") or {} for plan in plans)
    for change in find_changes(before, now, model=model, fixed=()):
        yield Cause(CONFIGURATION, f"{change.key}: {_said(change.before)} → {_said(change.now)}")


def _code(left: Prepared, right: Prepared) -> Iterator[Cause]:
    """Compare the trees that the runs kept, file by file; of each file, the first lines that differ."""
    if left.program.name == right.program.name:
        sides = [_files(one.program) for one in (left, right)]
        yield from _differing_files(*sides)
    packages = [(one.origin.kept or {}).get("package") for one in (left, right)]
    if packages[0] != packages[1] and None not in packages:
        yield Cause(CODE, f"ttlaunch itself: kept tree {str(packages[0])[:12]} → {str(packages[1])[:12]}")


def _files(folder: Path) -> dict[str, Path]:
    found = (path for path in folder.rglob("*") if path.suffix in _PYTHON and path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in found if "__pycache__" not in path.parts}


def _differing_files(left: Mapping[str, Path], right: Mapping[str, Path]) -> Iterator[Cause]:
    for name in sorted(left.keys() | right.keys()):
        if name == contract.TRAIN_FILE:
            continue  # what it says is compared as the configuration
        if name not in left or name not in right:
            yield Cause(CODE, f"{shown(name)}: only in the {'first' if name in left else 'second'} run")
            continue
        texts = [path.read_text(encoding="utf-8", errors="replace").splitlines() for path in (left[name], right[name])]
        if texts[0] != texts[1]:
            yield Cause(CODE, f"{shown(name)}{_first_change(*texts)}")


def _first_change(before: Sequence[str], now: Sequence[str]) -> str:
    """Describe the first place at which two texts differ, as `:LINE: old → new`."""
    matcher = difflib.SequenceMatcher(None, before, now, autojunk=False)
    for kind, first, last, begin, end in matcher.get_opcodes():
        if kind != "equal":
            old, new = (
                " ⏎ ".join(one.strip() for one in lines[:_MOST_LINES]) for lines in (before[first:last], now[begin:end])
            )
            return f":{begin + 1}: {_said(old or None)} → {_said(new or None)}"
    return ""


def _said(value: object) -> str:
    return "–" if value is None else shown(value, longest=_LONGEST)


def _environment(prepared: Prepared) -> Mapping[str, Any]:
    return read_object_if_any(prepared.origin.folder / contract.ENVIRONMENT_FILE)


def _parting(step: int, wrong: Sequence[Mismatch], sides: Sequence[ReplayEnd | None]) -> Parting:
    """Find what is the first to differ in a step: inputs, then forward passes, then backward passes, then the update."""
    tensors = tuple(dict.fromkeys(one.name for one in wrong if one.step == step and one.kind == "tensor"))
    left, right = sides
    if left is None or right is None:
        return Parting(step, "update", tensors[0] if tensors else None, None, tensors)
    inputs = [
        {batch.index: (batch.inputs_sha256, batch.targets_sha256) for one in end.ranks for batch in one.batches}
        for end in (left, right)
    ]
    index = _first_difference(*inputs)
    if index is not None:
        return Parting(step, "inputs", None, int(index), tensors)
    for what, passes in (
        ("activation", [[each for one in end.ranks for each in one.activations] for end in (left, right)]),
        ("gradient", [[each for one in end.ranks for each in reversed(one.micro_gradients)] for end in (left, right)]),
    ):
        found = _first_pass(*passes)
        if found is not None:
            return Parting(step, what, found[1], found[0], tensors)
    gradients = [_by_name(each for one in end.ranks for each in one.gradients) for end in (left, right)]
    name = _first_difference(*gradients)
    if name is not None:
        return Parting(step, "gradients", str(name), None, tensors)
    return Parting(step, "update", tensors[0] if tensors else None, None, tensors)


def _by_name(named: Iterable[NamedTensor]) -> dict[str, str]:
    return {one.name: one.facts.sha256 for one in named}


def _first_pass(left: Sequence[PassTensor], right: Sequence[PassTensor]) -> tuple[int, str] | None:
    """Find the first micro-batch with a difference, and the first of its tensors that differs."""
    sides: list[dict[tuple[int, str], str]] = [
        {(one.micro_batch, one.name): one.facts.sha256 for one in side} for side in (left, right)
    ]
    different = [key for key in sides[0] if key in sides[1] and sides[0][key] != sides[1][key]]
    if not different:
        return None
    micro_batch = min(index for index, _ in different)
    return next(key for key in different if key[0] == micro_batch)


def _first_difference(left: Mapping[Any, Any], right: Mapping[Any, Any]) -> Any:
    """Return the first key of both that has another value."""
    return next((key for key in left if key in right and left[key] != right[key]), None)
