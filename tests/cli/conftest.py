"""How tests ask for a refusal, whose whole transcript is compared; and the folder of a run with checkpoints."""

import hashlib
import json
import re
import shlex

import pytest

from ttlaunch import contract
from ttlaunch.running.checkpoints.complete import complete_checkpoints

from .screen import Terminal
from .tensor_files import tensor_file


def write_files(folder, files):
    """Write texts or bytes below a folder; None makes no file."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def without_counts(transcript):
    """The transcript without what a new key or a new built-in recipe would change, so that neither changes a golden file."""
    transcript = re.sub(r"not among its \d+ keys", "not among its N keys", transcript)
    return re.sub(r"recipes here: `.*", "recipes here: THE BUILT-IN ONES", transcript)


@pytest.fixture
def refused(here, ttlaunch, golden, portable, request):
    """`refused(line, status=…, files=…)`: the command ends with that status and says what the golden file says."""

    def check(line, *, status, files=None, stdin=None, answer=None):
        write_files(here, files or {})
        before = sorted(here.rglob("*"))
        answer = answer or ttlaunch(line, stdin=stdin)
        words = line if isinstance(line, str) else shlex.join(line)
        transcript = f"$ ttlaunch {words}\n{answer.stdout}{answer.stderr}exit status {answer.status}\n"
        name = request.node.name.removeprefix("test_").replace("[", "-").replace("]", "")
        golden(f"refusals/{name}.txt", without_counts(portable(transcript)))
        assert answer.status == status
        assert answer.stdout == ""
        made = [path for path in sorted(here.rglob("*")) if path not in before and "__pycache__" not in path.parts]
        assert made == []

    return check


@pytest.fixture
def trained(here, ttlaunch):
    """`trained(name, *steps, …)`: the folder of a run with checkpoints of these steps, two shards each."""

    def make(name, *steps, options="", recipe="hierarchical_parallel", also=None):
        run = here / "runs" / name
        run.mkdir(parents=True)
        plan = json.loads(ttlaunch(f"plan {recipe} --format json {options}").stdout)
        (run / contract.PLAN_FILE).write_text(json.dumps(plan))
        for step in steps:
            folder = run / f"{contract.checkpoint_dir(step)}.tmp"
            folder.mkdir(parents=True)
            for rank, tensors in enumerate([{"b": [1, 2], "optimizer.mean.b": [3]}, {"a": [4, 5, 6], **(also or {})}]):
                data = tensor_file(tensors)
                (folder / contract.shard_file(rank)).write_bytes(data)
                record = {"owners": [0, 1], "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                record |= {"tensors": list(tensors), "state": {"data": {"epoch": 0, "sample": 16 * step}}}
                (folder / contract.shard_record(rank)).write_text(json.dumps(record))
        assert list(steps) == complete_checkpoints(run, plan, run_id=name)
        return run

    return make


@pytest.fixture
def terminal(here):
    """`terminal(*arguments, width=…, NAME=…)`: ttlaunch under a pseudo-terminal, with these environment variables."""
    started = []

    def start(*arguments, **options):
        started.append(Terminal(here, *arguments, **options))
        return started[-1]

    yield start
    for each in started:
        each.close()
