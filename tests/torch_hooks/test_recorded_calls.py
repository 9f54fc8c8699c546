"""What the flight recorders hold of a plain script's calls of torch, and that the script computes what it computes without them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ttlaunch
from ttlaunch import contract
from ttlaunch.agent.held_port import hold_port
from ttlaunch.flight_recorder import BEGUN_COLLECTIVE, COLLECTIVE, GROUP, IRECV, ISEND, WAIT_RECV, WAIT_SEND, WORLD
from ttlaunch.running.flight_recorders import read_recorders
from ttlaunch.torch_hooks.group_records import GroupRecords

pytestmark = pytest.mark.mpi

AT_START = Path(ttlaunch.__file__).parent / "at_start"


@pytest.fixture
def start_ranks(here):
    """`start_ranks(code, with_hooks=…)`: what two ranks of a script print, each started as its shim does."""

    def start(code, *, with_hooks=True, first=""):
        (here / "train.py").write_text(code)
        (here / contract.RECORDS_DIR).mkdir(exist_ok=True)
        held = hold_port()
        plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}
        ranks = []
        for rank in range(2):
            own = {
                "RANK": str(rank),
                contract.ENV_RANK: str(rank),
                contract.ENV_WORLD_SIZE: "2",
                "OMP_NUM_THREADS": "1",
            }
            hooked = {
                "PYTHONPATH": str(AT_START),
                contract.ENV_EXCEPTIONS: str(here / contract.exceptions_file(rank)),
                contract.ENV_SCRATCH: str(here),
            }
            command = [sys.executable, *(["-c", first] if first else []), *([] if first else ["train.py"])]
            environment = plain | common | own | (hooked if with_hooks else {})
            ranks.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        try:
            ends = [rank.communicate(timeout=60) for rank in ranks]
        finally:
            held.close()
            for rank in ranks:
                rank.kill()
                rank.communicate()
        assert [0, 0] == [rank.returncode for rank in ranks], ends[0][1] + ends[1][1]
        return [out for out, _ in ends]

    return start


def operations(folder, rank):
    return read_recorders(folder, ranks=range(2))[rank].operations


CALLS = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
one = torch.ones(8)
dist.all_reduce(one)
work = dist.all_reduce(one, async_op=True)
work.wait()
both = [None, None]
dist.all_gather_object(both, {"rank": rank})
work = dist.isend(one, 1) if rank == 0 else dist.irecv(one, 0)
work.wait()
alone = dist.new_group([0])
if rank == 0:
    dist.all_reduce(one, group=alone)
dist.barrier()
dist.destroy_process_group()
"""


def test_each_call_is_recorded_with_its_group_bytes_and_line(here, start_ranks):
    start_ranks(CALLS)
    first, second = (operations(here, rank) for rank in range(2))
    found = [(one.name, one.nbytes, one.verb, int(one.place.rpartition(":")[2])) for one in first if one.is_collective]
    assert [
        ("torch's init_process_group", 0, COLLECTIVE, 2),
        ("torch's all_reduce", 32, COLLECTIVE, 5),
        ("torch's all_reduce", 32, COLLECTIVE, 6),
        ("torch's all_gather_object", 0, COLLECTIVE, 9),
        ("torch's new_group", 0, COLLECTIVE, 12),
        ("torch's all_reduce", 32, COLLECTIVE, 14),
        ("torch's barrier", 0, COLLECTIVE, 15),
    ] == found
    assert all(not one.is_open for one in (*first, *second))
    assert {str(here / "train.py")} == {one.place.rpartition(":")[0] for one in first}
    sent = [(one.verb, one.peer, one.message) for one in first if not one.is_collective]
    assert [(ISEND, 1, 1), (WAIT_SEND, 1, 1)] == sent
    assert [(IRECV, 0, 1), (WAIT_RECV, 0, 1)] == [(o.verb, o.peer, o.message) for o in second if not o.is_collective]
    # Both ranks count the operations of all ranks alike; the group of rank 0 alone has a count of its own.
    counts = [read_recorders(here, ranks=range(2))[rank].channels[GROUP, WORLD, False] for rank in range(2)]
    assert [6, 6] == counts
    assert [1] == [one.message for one in first if one.is_collective and one.tag != WORLD]


def test_an_operation_that_the_script_does_not_wait_for_yet_is_no_wait(here, start_ranks):
    script = (
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "work = dist.all_reduce(torch.ones(8), async_op=True)\n"
        "dist.barrier()\nos._exit(0)\n"
    )
    start_ranks(script)
    kept = [one for one in operations(here, 0) if one.name == "torch's all_reduce"]
    assert [(BEGUN_COLLECTIVE, True)] == [(one.verb, one.is_open) for one in kept]
    assert read_recorders(here, ranks=range(2))[0].waiting is None


TRAINING = """\
import hashlib, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")


def train(find, has_own_hook):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.BatchNorm1d(33), torch.nn.Linear(33, 5))
    replica = DistributedDataParallel(model, bucket_cap_mb=0.001, find_unused_parameters=find)
    calls = []
    def own(state, bucket):
        calls.append(bucket.index())
        return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda f: f.value()[0])
    if has_own_hook:
        replica.register_comm_hook(None, own)
    optimizer = torch.optim.AdamW(replica.parameters())
    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(5):
        with replica.no_sync():
            replica(torch.randn(4, 7, generator=draw)).square().mean().backward()
        replica(torch.randn(4, 7, generator=draw)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(hashlib.sha256(data).hexdigest(), sorted(model.state_dict()), len(calls) >= 5)


train(False, False)
train(True, False)
train(False, True)
torch.manual_seed(0)
replica = DistributedDataParallel(torch.nn.Linear(4, 4))
compiled = torch.compile(replica, backend="eager")
for _ in range(2):
    compiled(torch.ones(2, 4)).sum().backward()
def add(x):
    dist.all_reduce(x)
    return x + 1
print(torch.compile(add, backend="eager", fullgraph=True)(torch.ones(2)).tolist(), replica.module.weight.grad[0, 0].item())
dist.destroy_process_group()
"""


def test_replicas_also_with_a_hook_of_their_own_or_compiled_have_the_bits_that_they_have_without_the_hooks(
    here, start_ranks
):
    """All in one script, because two pairs of processes import torch for it."""
    printed = start_ranks(TRAINING)
    assert printed == start_ranks(TRAINING, with_hooks=False)
    assert ["False", "False", "True"] == [line.split()[-1] for line in printed[0].splitlines()[:3]]
    name = "DistributedDataParallel's backward pass"
    line = (
        TRAINING.splitlines().index("        replica(torch.randn(4, 7, generator=draw)).square().mean().backward()") + 1
    )
    passes = [one for one in operations(here, 0) if one.name == name]
    # Five of each replica, none of `no_sync`; the compiled one has passes of 20 values.
    assert [(COLLECTIVE, 4 * 500)] * 15 == [(one.verb, one.nbytes) for one in passes if one.nbytes > 100]
    assert all(not one.is_open for one in passes)
    assert {f"{here / 'train.py'}:{line}"} == {one.place for one in passes if one.nbytes > 100}
    assert 12 <= sum(one.name == "DistributedDataParallel's broadcast of buffers" for one in operations(here, 0))


def test_a_process_that_imports_torch_before_the_hooks_is_recorded_too(here, start_ranks):
    """A rank that is forked from a process has torch loaded already."""
    first = (
        "import os, torch, torch.distributed as dist\n"
        "from ttlaunch.torch_hooks.at_import import install\n"
        "install(os.environ)\n"
        "exec(compile(open('train.py').read(), 'train.py', 'exec'))\n"
    )
    script = "dist.init_process_group('gloo')\ndist.all_reduce(torch.ones(2))\n"
    start_ranks(script, first=f"import sys; sys.path.insert(0, {str(AT_START.parents[1])!r})\n{first}")
    assert "torch's all_reduce" in [one.name for one in operations(here, 1)]


def test_a_process_that_the_rank_forks_leaves_the_recorder_alone(here, start_ranks):
    script = (
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if (child := os.fork()) == 0:\n"
        "    try:\n        dist.all_reduce('no tensor')\n    except BaseException:\n        pass\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
    )
    start_ranks(script)
    assert ["torch's init_process_group"] == [one.name for one in operations(here, 0)]


def test_a_call_that_the_recorder_has_no_room_for_ends_the_records_and_not_the_script(tmp_path):
    records = GroupRecords(str(tmp_path), rank=0, world_size=2)
    records.open()
    assert records.begin(ISEND, ("torch's isend", None), peer=1, tag=3) > 0
    assert (0, False) == (records.begin(ISEND, ("torch's isend", None), peer=1, tag=2**40), records.is_open)


def test_a_script_without_a_group_leaves_no_recorder(here, start_ranks):
    start_ranks("import torch\nimport os\nprint(sorted(n for n in os.environ if 'PYTHONPATH' in n))\n")
    assert {} == read_recorders(here, ranks=range(2))
