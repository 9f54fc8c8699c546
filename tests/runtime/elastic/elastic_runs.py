"""Elastic runs without a launcher: real worker processes, and the real coordinator, which the test drives.

A fault is a line of code that a worker runs at one place of one step, as a recipe that misbehaves would.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.runtime.elastic.forked_python import ForkedProcess
from ttlaunch import contract
from ttlaunch.membership.coordinator import step
from ttlaunch.membership.coordinator_state import Coordinator, Phase, Terms
from ttlaunch.membership.messages import EndOrdered, LeaveAsked, Lost, Member, Tick, orders_to_json
from ttlaunch.membership.reports import event_of
from ttlaunch.records.members import MemberReport
from ttlaunch.records.ranks import read_progress
from ttlaunch.running.report import combine_digests
from ttlaunch.spec.recipe.data import default_path, read_data
from ttlaunch.spec.recipe.importing import import_recipe_module

RECIPES = Path(__file__).parents[3] / "recipes"
RECIPE = RECIPES / "data_parallel"
SECONDS = 120.0
_LOOK_S, _TICK_S = 0.01, 0.2

HAPPENING = """

import os as _os, signal as _signal
from ttlaunch.runtime.elastic.feed import Feed as _Feed
from ttlaunch.runtime.elastic.giving import Giver as _Giver
from ttlaunch.runtime.training.loop import TrainingLoop as _Loop


class _Aborts:
    def __del__(self):
        _os.abort()  # as gRPC does at times when a process is taken apart; a worker must have ended before


_one = _Aborts()
_number, _faults = int(_os.environ["TTLAUNCH_RANK"]), FAULTS
_at = {"step": 0}


def _happen(place, **known):
    code = _faults.get((_number, place, _at["step"])) or _faults.get((_number, place, "every step"))
    if code:
        exec(code, globals() | known)


def _wrap(cls, name, place, *, after=False):
    inner = getattr(cls, name)

    def outer(self, *args, **named):
        if name in {"mean", "step"}:
            _at["step"] = args[0]
        if not after:
            _happen(place, one=self)
        found = inner(self, *args, **named)
        if after:
            _happen(place, one=self)
        return found

    setattr(cls, name, outer)


_wrap(_Loop, "end_step", "after the update")
_wrap(_Giver, "give", "when it should give", after=True)
_wrap(_Giver, "give", "when it is about to give")
_wrap(_Feed, "_note", "when a follower asks")
"""
_FAULTS = """
import ttlaunch.runtime.parallel.shared_validation as _shared
from ttlaunch.runtime.parallel.gradients.elastic_exchange import ElasticExchange as _Exchange
from ttlaunch.runtime.parallel.gradients.exchange import GradientExchange as _Plain

_wrap(_Exchange, "mean", "before the step")
_wrap(_Exchange, "expect", "in a backward pass")
_wrap(_Plain, "_gather", "while buckets are under way")
_validation_losses, _differentiate = _shared.validation_losses, differentiate


def differentiate(*args, **named):
    _happen("in a micro-batch")
    return _differentiate(*args, **named)


def _validate(*args, **named):
    found = _validation_losses(*args, **named)
    _happen("in a validation")
    return found


_shared.validation_losses = _validate
"""


@dataclass(frozen=True)
class Kind:
    """A recipe whose runs are elastic, and the code that injects faults into one of its modules.

    Attributes:
        slots, servers, has_local_steps: As in `Terms`.
    """

    folder: Path
    role: str
    module: str
    faults: str
    slots: int | None = None
    servers: int = 0
    has_local_steps: bool = False


DATA_PARALLEL = Kind(RECIPE, "worker", "trainer.py", HAPPENING + _FAULTS)

KILL = "_os.kill(_os.getpid(), _signal.SIGKILL)"
BEGUN = "open(f'begun-{_number}', 'w').close()"
"""Tells `ElasticRun.until_begun`."""
KILL_BEFORE_THE_LAST_SHARD = """
def _isend(tensor, *, dest, tag=0, inner=one._ctx.isend):
    # The last message of the last bucket: others have what they need of this worker, and `dest` has not.
    if dest == 2 and len(one._gathering) == 4 * len(one._buckets) - 1:
        one._gathering[-2].wait()
        import time
        time.sleep(0.5)
        _os.kill(_os.getpid(), _signal.SIGKILL)
    return inner(tensor, dest=dest, tag=tag)
if not hasattr(one._ctx, "_is_faulty"):
    one._ctx._is_faulty = True
    one._ctx.isend = _isend
"""
SLOW = "import time; time.sleep(0.1)"
_CALM = """
import time as _time
_end = _time.monotonic() + {1}
while not _os.path.exists({0!r}) and _time.monotonic() < _end:
    _time.sleep(0.01)
"""
_GATE = """
import time as _time
while not _os.path.exists({0!r}):
    _time.sleep(0.01)
"""


def gate(name):
    """A fault that waits until `ElasticRun.open(name)`."""
    return _GATE.format(name)


def calm(name, seconds=2.5):
    """A fault that makes a step last so long until `ElasticRun.open(name)`, so that others can join between steps."""
    return _CALM.format(name, seconds)


def plan_of(folder, config, *, roles, later=0):
    declared = import_recipe_module(folder, "recipe").RECIPE
    resolved = declared.config.model_validate(config)
    data = default_path(resolved)
    corpus = read_data(data)
    count = len(roles)
    row = {"host": "localhost", "slot": 0, "local_rank": 0, "mesh_id": None}
    return {
        "format": contract.PLAN_FORMAT,
        "hash": "test",
        "recipe": {"name": "data_parallel", "folder": str(folder)},
        "layout": "test",
        "world_size": count,
        "ranks": [
            {"rank": rank, "role": role, "later": rank >= count - later, **row} for rank, role in enumerate(roles)
        ],
        "flows": [],
        "config": resolved.model_dump(mode="json"),
        "data": {"path": data and str(data), "sha256": corpus.sha256, "bytes": len(corpus.text)},
    }


class ElasticRun:
    """Workers and their coordinator.

    Attributes:
        state: The coordinator.
        reports: The records of each worker, by number.
        statuses: How the workers that have ended ended.
    """

    def __init__(
        self, folder, config, *, first, later=0, minimum=1, maximum=8, faults=None, start=None, kind=DATA_PARALLEL
    ):
        self.folder, self.role = folder, kind.role
        recipe = folder / "recipe"
        shutil.copytree(kind.folder, recipe)
        trainer = recipe / kind.module
        trainer.write_text(trainer.read_text() + kind.faults.replace("FAULTS", repr(faults or {}), 1))
        plan = plan_of(recipe, config, roles=[kind.role] * (first + later), later=later)
        plan |= {"elastic": [minimum, maximum], "start": start}
        (folder / contract.PLAN_FILE).write_text(json.dumps(plan))
        micro_batches = import_recipe_module(recipe, "recipe").RECIPE.config.model_validate(config)
        count = micro_batches.training_config.micro_batches
        cut = {"slots": kind.slots, "servers": kind.servers, "has_local_steps": kind.has_local_steps}
        terms = Terms(minimum, maximum, count, frozenset(range(first)), **cut)
        self.state = Coordinator(terms)
        self.epochs = []
        self.records = defaultdict(list)
        self.statuses = {}
        self._processes = {}
        self._read = defaultdict(int)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(0)
        self._ticked = 0.0
        for number in range(first):
            self.start(number)

    def start(self, number):
        variables = {
            contract.ENV_PLAN: str(self.folder / contract.PLAN_FILE),
            contract.ENV_RUN_DIR: str(self.folder),
            contract.ENV_SCRATCH: str(self.folder),
            contract.ENV_RUN_ID: "test",
            contract.ENV_RANK: str(number),
            contract.ENV_ROLE: self.role,
            "OMP_NUM_THREADS": "1",
        }
        self._processes[number] = ForkedProcess(
            "ttlaunch.runtime",
            cwd=self.folder,
            env=os.environ | variables,
            output=self.folder / f"output-{number}",
        )

    def kill(self, number, sent=signal.SIGKILL):
        self._processes[number].send_signal(sent)

    def open(self, name):
        (self.folder / name).touch()

    def start_all(self, *numbers):
        """Start workers, and wait until they have registered."""
        for number in numbers:
            self.start(number)
        self.until(lambda run: set(numbers) <= run.state.workers.keys())

    def until_members(self, *numbers):
        self.until(lambda run: run.state.begin is not None and run.state.begin.numbers == numbers)

    def until_begun(self, *numbers):
        """Wait until these workers have run `BEGUN`."""
        self.until(lambda run: all((run.folder / f"begun-{number}").exists() for number in numbers))

    def order_to_stop(self, *numbers):
        """Order these workers, which are all that live, to stop as Ctrl-C does; return the last step."""
        for number in numbers:
            self.kill(number, signal.SIGUSR1)
        self.until(lambda run: all(run.of_kind(number, contract.KIND_STOPPING) for number in numbers))
        last = max(record["step"] for number in numbers for record in self.of_kind(number, contract.KIND_STOPPING))
        (self.folder / contract.ENDING_FILE).write_text(json.dumps({"after_step": last}))
        for number in numbers:
            self.kill(number, signal.SIGUSR1)
        self._take(EndOrdered())
        return last

    def ask_to_leave(self, number):
        self._take(LeaveAsked(number))

    def until(self, condition, *, may_strand=False):
        """Go on until `condition(self)` is true; fail after a while, or when nobody has the state any more, unless that is expected."""
        deadline = time.monotonic() + SECONDS
        while not condition(self):
            assert time.monotonic() < deadline, self.story()
            assert may_strand or self.state.phase is not Phase.STRANDED, self.story()
            self._look()
            time.sleep(_LOOK_S)

    def finish(self):
        """Go on until every worker has ended."""
        self.until(lambda run: len(run.statuses) == len(run._processes))
        return self

    def close(self):
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._socket.close()

    def applied(self, number):
        """The last step that a worker has reported."""
        known = self.state.workers.get(number)
        return -1 if known is None or known.applied is None else known.applied

    def of_kind(self, number, kind):
        return [record for record in self.records[number] if record["kind"] == kind]

    def digest(self, number):
        [record] = self.of_kind(number, contract.KIND_PARAMETERS)
        return combine_digests([record["digests"]])[0]

    def output(self, number):
        return (self.folder / f"output-{number}").read_text()

    def _look(self):
        ended = {number: process.poll() for number, process in self._processes.items() if number not in self.statuses}
        for number in self._processes:
            self._read_records(number)
        for number, status in ended.items():
            if status is not None:
                self._read_records(number)
                self.statuses[number] = status
                self._take(Lost(Member(number, 0)))
        if time.monotonic() - self._ticked > _TICK_S:
            self._ticked = time.monotonic()
            self._take(Tick())

    def _read_records(self, number):
        path = self.folder / contract.progress_file(number)
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read[number])
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self._read[number] += len(whole)
        for line in whole.splitlines():
            self.records[number].append(contract.read_record(line))
            report = read_progress(line)
            if isinstance(report, MemberReport):
                event = event_of(number, report)
                assert event is not None, line
                self._take(event)

    def _take(self, event):
        before = self.state
        self.state, orders = step(before, event)
        if self.state.begin is not None and self.state.begin is not before.begin:
            self.epochs.append(self.state.begin)
        for member, text in orders_to_json(orders):
            path = self.folder / contract.orders_socket(member.number)
            with contextlib.suppress(OSError):  # the order is repeated
                self._socket.sendto(text.encode(), str(path))

    def story(self):
        """What the coordinator knows, and the last that each worker has reported and printed."""
        outputs = {number: self.output(number)[-3000:] for number in self._processes}
        last = {number: records[-3:] for number, records in self.records.items()}
        return "\n".join([str(self.state), str(self.statuses), *map(str, last.items()), *map(str, outputs.items())])


def in_one_process(folder, config, *, recipe=RECIPE, epochs=()):
    """Train in one process, and return the digest of the parameters, the loss of each step, and that of each validation.

    With `epochs`, repeat a run in which these workers took steps of their own, as `ttlaunch repro` does.
    """
    folder.mkdir()
    (folder / contract.PLAN_FILE).write_text(
        json.dumps(plan_of(recipe, config, roles=["trainer"]) | {"epochs": epochs})
    )
    variables = {
        contract.ENV_PLAN: str(folder / contract.PLAN_FILE),
        contract.ENV_RUN_DIR: str(folder),
        contract.ENV_RUN_ID: "test",
        "OMP_NUM_THREADS": "1",
    }
    trainer = ForkedProcess(
        "ttlaunch.runtime.simulate", cwd=folder, env=os.environ | variables, output=folder / "output"
    )
    assert trainer.wait() == 0, (folder / "output").read_text()
    lines = (folder / contract.progress_file(0)).read_text().splitlines()
    records = [contract.read_record(line) for line in lines]
    [found] = [record for record in records if record["kind"] == contract.KIND_PARAMETERS]
    return combine_digests([found["digests"]])[0], losses_of(records), validations_of(records)


def losses_of(records):
    return {
        record["step"]: record["loss"]
        for record in records
        if record["kind"] == contract.KIND_STEP and "loss" in record
    }


def validations_of(records):
    return {record["step"]: record["loss"] for record in records if record["kind"] == contract.KIND_VALIDATION}


def check(run, expected, *, finished, digest_of=ElasticRun.digest):
    """All that finished have the parameters of one process, and what was reported is what that process has reported."""
    digest, losses, validations = expected
    assert dict.fromkeys(finished, 0) == {number: run.statuses[number] for number in finished}
    assert {digest} == {digest_of(run, number) for number in finished}
    found, validated = {}, {}
    for records in run.records.values():
        found |= losses_of(records)
        validated |= validations_of(records)
    assert losses == losses | found
    assert validations == validated
