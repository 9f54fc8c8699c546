"""The variables of ranks of Python programs, one by one against torchrun's, and what they do not get."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ttlaunch import contract
from ttlaunch.agent.shim import rank_environment

PRINT = "import json, os\nopen('of-' + os.environ['RANK'] + '.json', 'w').write(json.dumps(dict(os.environ)))\n"
PAGE = Path(__file__).parents[2] / "docs/how-to/run-your-pytorch-script.md"


def rows(*hosts):
    places = [(host, hosts[:number].count(host)) for number, host in enumerate(hosts)]
    return [
        {"rank": rank, "local_rank": local, "host": host, "role": "rank", "device_shape": None, "environment": {}}
        for rank, (host, local) in enumerate(places)
    ]


def seen_by(rank, *hosts, inherited=None, uses_mpi=False, own=None, **changes):
    plan = {
        "recipe": None,
        "python": {"uses_mpi": uses_mpi},
        "environment": own or {},
        "managed": [],
        "engine": {"names": {"network_variables": ["SOME_NETWORKS"], "rank_prefixes": ["OMPI_", "PMIX_"]}},
        "world_size": len(hosts),
        "ranks": rows(*hosts),
        **changes,
    }
    return rank_environment(plan, plan["ranks"][rank], inherited or {}, run_folder="/run", plan_path="/run/plan.json")


def test_a_rank_knows_its_place_on_its_host_and_among_hosts():
    seen = seen_by(2, "a", "a", "b")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK")
    assert ["2", "3", "0", "1", "1", "2", "1"] == [seen[name] for name in names]
    assert ("rank", "2", "3") == (seen["ROLE_NAME"], seen["ROLE_RANK"], seen["ROLE_WORLD_SIZE"])


def test_an_exception_that_torchs_record_writes_lands_in_the_folder_of_the_run():
    seen = [seen_by(rank, "a", "b")["TORCHELASTIC_ERROR_FILE"] for rank in range(2)]
    assert ["/run/records/rank-0.torch-error.json", "/run/records/rank-1.torch-error.json"] == seen


def test_a_rank_has_every_variable_that_nobody_may_set_for_all():
    assert set(contract.TORCH_PLACE) <= set(seen_by(0, "a"))


def test_what_the_user_sets_wins_and_a_place_in_the_shell_does_not():
    seen = seen_by(1, "a", "a", own={"RANK": "7"}, inherited={"WORLD_SIZE": "9", "OMP_NUM_THREADS": "4"})
    assert ("7", "2", "4") == (seen["RANK"], seen["WORLD_SIZE"], seen["OMP_NUM_THREADS"])


def test_threads_are_limited_only_where_ranks_share_a_host():
    assert "1" == seen_by(0, "a", "a")["OMP_NUM_THREADS"]
    assert "OMP_NUM_THREADS" not in seen_by(0, "a", "b")


def test_the_address_and_port_of_the_launcher_reach_a_rank_under_the_names_of_torch_alone():
    given = {contract.ENV_MASTER_ADDR: "10.0.0.1", contract.ENV_MASTER_PORT: "12345", contract.ENV_RESTARTS: "2"}
    seen = seen_by(0, "a", inherited={**given, contract.ENV_MOST_RESTARTS: "3"})
    assert ("10.0.0.1", "12345") == (seen["MASTER_ADDR"], seen["MASTER_PORT"])
    assert ("2", "3") == (seen["TORCHELASTIC_RESTART_COUNT"], seen["TORCHELASTIC_MAX_RESTARTS"])
    assert not [name for name in seen if name in {*given, contract.ENV_MOST_RESTARTS}]


def test_ranks_that_were_started_by_hand_keep_the_address_of_the_shell():
    assert "10.9.9.9" == seen_by(0, "a", inherited={"MASTER_ADDR": "10.9.9.9"})["MASTER_ADDR"]


@pytest.mark.parametrize(("uses_mpi", "left"), [(True, ["OMPI_COMM_WORLD_RANK", "PMIX_RANK"]), (False, [])])
def test_variables_of_the_engine_reach_only_programs_that_name_mpi(uses_mpi, left):
    seen = seen_by(0, "a", uses_mpi=uses_mpi, inherited={"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"})
    assert left == sorted(name for name in seen if name.startswith(("OMPI_", "PMIX_")))


def test_ranks_with_devices_are_not_told_to_use_the_processor():
    with_devices = [{**row, "device_shape": [1, 1]} for row in rows("a", "a")]
    assert "ACCELERATE_USE_CPU" not in seen_by(0, "a", "a", ranks=with_devices)


def test_gloo_and_nccl_use_the_interface_in_the_networks_chosen_for_ranks_unless_the_user_chose_another():
    chosen = {"SOME_NETWORKS": "127.0.0.0/8"}
    seen = seen_by(0, "a", "b", inherited=chosen)
    assert ("lo", "=lo") == (seen["GLOO_SOCKET_IFNAME"], seen["NCCL_SOCKET_IFNAME"])
    assert "eth9" == seen_by(0, "a", "b", inherited={**chosen, "GLOO_SOCKET_IFNAME": "eth9"})["GLOO_SOCKET_IFNAME"]
    for networks in ({}, {"SOME_NETWORKS": "lo"}, {"SOME_NETWORKS": "203.0.113.0/24"}):
        assert "GLOO_SOCKET_IFNAME" not in seen_by(0, "a", "b", inherited=networks)


def environments(folder, command, pattern):
    """What two ranks see that a command starts, each once it is known which differences are documented."""
    clean = {name: value for name, value in os.environ.items() if not re.match("OMP|TORCH|PRTE_|PMIX_|OPAL_", name)}
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=100, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    found = [json.loads((folder / f"of-{rank}.json").read_text()) for rank in range(2)]
    return [{name: value for name, value in one.items() if re.match(pattern, name)} for one in found]


@pytest.mark.mpi
@pytest.mark.slow
def test_two_ranks_see_what_torchrun_gives_them_but_for_the_list_in_the_documents(here):
    (here / "show.py").write_text(PRINT)
    pattern = r"(?!TTLAUNCH_|TT_|PYTHON|_$|SHLVL$|PWD$|OLDPWD$)"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "show.py"]
    expected = environments(here, torchrun, pattern)
    found = environments(here, [sys.executable, "-m", "ttlaunch", "run", "-n", "2", "show.py"], pattern)
    documented = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))
    for ours, theirs in zip(found, expected, strict=True):
        differing = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
        assert differing <= documented
        # The machine may have a GPU, mpirun's libraries may be where the system looks for them, and no network was chosen.
        elsewhere = {"ACCELERATE_USE_CPU", "LD_LIBRARY_PATH", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
        assert documented <= differing | elsewhere
        assert not [name for name in ours if name.startswith(("OMPI_", "PMI_", "PMIX_"))]


DDP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
losses = []
for _ in range(5):
    loss = model(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    dist.all_reduce(total := loss.detach().clone())
    losses.append(total.item())
if dist.get_rank() == 0:
    print("losses", dist.get_world_size(), [loss.hex() for loss in losses], flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.mpi
@pytest.mark.slow
def test_a_script_of_torchrun_trains_unchanged_with_the_same_losses(here):
    (here / "train.py").write_text(DDP)

    def losses(*command):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=here, capture_output=True, text=True, timeout=100, check=False
        )
        found = re.search(r"losses .*", done.stdout)
        assert found, done.stdout + done.stderr
        return found.group()

    expected = losses("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    assert expected.startswith("losses 2 ")
    assert expected == losses("ttlaunch", "run", "-n", "2", "--", sys.executable, "train.py")


@pytest.mark.mpi
@pytest.mark.slow
def test_a_port_that_another_process_has_is_the_named_cause(here):
    (here / "train.py").write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = f"MASTER_PORT={other.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "ttlaunch", "run", "-n", "2", "--env", port, "train.py"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert 1 == done.returncode
    cause = (
        "error[R067]: rank 0 (rank, localhost) found the port of torch's store, MASTER_PORT, taken by another process"
    )
    assert cause in done.stderr
    assert "hint: set MASTER_PORT nowhere" in done.stderr


@pytest.mark.mpi
def test_a_library_that_imports_mpi_in_a_script_without_mpi_is_told_what_to_do(here):
    # The module's name is put together, as a library outside of the script's folder would hide it.
    (here / "work.py").write_text("import importlib\nimportlib.import_module('mp' + 'i4py.MPI')\n")
    command = [sys.executable, "-m", "ttlaunch", "run", "-n", "2", "work.py"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=100, check=False)
    assert 1 == done.returncode
    assert "error[R068]: rank " in done.stderr
    assert "this rank runs without MPI, and would be alone in a world of its own" in done.stderr
    assert "hint: `--engine openmpi` gives the ranks MPI" in done.stderr
    given = subprocess.run(
        [*command, "--engine", "openmpi"], cwd=here, capture_output=True, text=True, timeout=100, check=False
    )
    assert 0 == given.returncode, given.stderr


@pytest.mark.mpi
def test_a_restart_is_counted_and_draws_another_port(here):
    (here / "work.py").write_text(
        "import os, sys\n"
        "count = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "seen = [count, os.environ['TORCHELASTIC_MAX_RESTARTS'], os.environ['MASTER_PORT']]\n"
        "open('seen-' + count, 'w').write(' '.join(seen))\n"
        "sys.exit(count == '0')\n"
    )
    command = [sys.executable, "-m", "ttlaunch", "run", "--max-restarts", "3", "work.py"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=100, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    first, second = [(here / f"seen-{number}").read_text().split() for number in range(2)]
    assert [["0", "3"], ["1", "3"]] == [first[:2], second[:2]]
    assert first[2] != second[2]
    assert 1 == len({json.loads(path.read_text())["hash"] for path in here.glob("runs/*/plan.json")})
