"""`ttlaunch run` over real hosts: everything is checked and copied, ranks start where they should, nothing stays behind."""

import contextlib
import json
import shutil
import signal
import subprocess
import sys

import pytest

from tests.cluster.keeper import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.mpi]

STEPS = "--set training_config.steps=4 --set training_config.validation_interval=4"
SYSTEM = {"python": "/usr/bin/python3", "mpi_prefix": sys.prefix}
"""For users of hosts who may not read the launching user's own interpreter."""
SUM = """\
from mpi4py import MPI
assert MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1) == 3
"""
"""What two ranks need each other for; a script imports no torch, which takes a rank seconds."""

WHERE = """\
import os, socket, sys
from mpi4py import MPI
print(socket.gethostname(), os.getcwd(), MPI.COMM_WORLD.size, open("shared/hello.txt").read().strip(), sys.prefix)
"""


@pytest.fixture
def lab(tmp_path):
    """`lab(cluster, …)`: writes `hosts.txt` and, from keywords, `cluster.yaml` of the configuration `lab`."""

    def write(hostfile, **settings):
        folder = tmp_path / "configurations/lab"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts.txt").write_text(hostfile)
        (folder / "cluster.yaml").write_text(json.dumps(settings) + "\n")
        return folder

    return write


def leftovers(cluster, *, hosts=None):
    """Processes on the hosts other than sshd, and folders in shared memory; hosts first finish their copies of the code."""
    copying = [
        path for host in hosts or cluster.hosts for path in cluster.path(host, "/root/.ttlaunch").glob("*/.incoming-*")
    ]
    if copying:
        with contextlib.suppress(TimeoutError):
            wait_until(
                lambda: not _left_on(cluster, hosts), what="hosts have made their copies and nothing else is left"
            )
    return _left_on(cluster, hosts)


def _left_on(cluster, hosts):
    found = []
    for host in hosts or cluster.hosts:
        found += [
            (host, words) for words in cluster.pids(host).values() if not words.startswith(("sshd", "/usr/sbin/sshd"))
        ]
        found += [(host, name) for name in cluster.run(host, ["ls", "/dev/shm"]).stdout.split()]
    return found


def digest(answer):
    assert answer.status == 0, answer.stderr
    return json.loads(answer.stdout)["parameters_sha256"]


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("fabric_minimal", "--ranks 4 --set all_reduce_config.repeats=2"),
        ("fully_sharded", f"{STEPS} --set multihost_config.num_workers=4 --set fully_sharded_config.replicas=2"),
        ("pipeline_parallel", f"{STEPS} --set multihost_config.pipeline_parallel_config.blocks_per_rank=[1,1,1,1]"),
    ],
)
def test_recipes_run_across_four_hosts(cluster4, ttlaunch_on, lab, tmp_path, recipe, settings):
    """Their telemetry and traces come home: bytes are those of the formula, and every host's clock was compared.

    Of `fully_sharded` torch's own groups have found the network between the hosts.
    """
    lab(cluster4.hostfile())
    answer = ttlaunch_on(cluster4)(f"run {recipe} --on lab {settings} --trace --format json", timeout_s=120)
    assert answer.status == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert [row["host"] for row in report["ranks"]] == cluster4.hosts
    edges = report["traffic"]["edges"]
    assert edges
    assert [edge for edge in edges if edge["bytes"] != edge["formula_bytes"]] == []
    [timeline] = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/trace.json")]
    assert [clock["host"] for clock in timeline["otherData"]["clocks"]] == cluster4.hosts
    assert all(clock["error_us"] > 0 for clock in timeline["otherData"]["clocks"][1:])
    wait_until(lambda: not leftovers(cluster4), what="hosts as before the run")


def test_four_hosts_give_the_bits_of_one_process(cluster4, ttlaunch_on, lab):
    lab(cluster4.hostfile())
    run = ttlaunch_on(cluster4)
    alone = digest(run(f"run hierarchical_parallel --ranks 1 {STEPS} --format json", timeout_s=120))
    spread = digest(run(f"run hierarchical_parallel --on lab {STEPS} --format json", timeout_s=120))
    assert alone == spread


def test_a_script_finds_its_files_on_every_host(cluster4, ttlaunch_on, lab, tmp_path):
    lab(cluster4.hostfile())
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/hello.txt").write_text("hello\n")
    (tmp_path / "where.py").write_text(WHERE)
    answer = ttlaunch_on(cluster4)("run where.py --on lab --ranks 4", timeout_s=60)
    assert answer.status == 0, answer.stderr
    lines = sorted(line.split(" | ")[1].split() for line in answer.stdout.splitlines() if " | " in line)
    assert [(line[0], line[2], line[3]) for line in lines] == [(host, "4", "hello") for host in cluster4.hosts]
    [code] = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/code.json")]
    assert all(f"/root/.ttlaunch/releases/{code['release']}/" in line[1] for line in lines)


JOINED = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(total := torch.tensor([dist.get_rank() + 1.0]))
held = {name for name in os.environ if name.startswith(("OMPI_", "PMIX_", "TTLAUNCH_MASTER"))}
place = [os.environ[name] for name in ("LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "MASTER_ADDR")]
print("joined", dist.get_world_size(), total.item(), *place, held or "-", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("here", [0, 1])
def test_a_script_of_torchrun_joins_its_ranks_over_hosts(make_cluster, ttlaunch_on, lab, tmp_path, here):
    cluster = make_cluster(hosts=2 - here)
    lab("launcher slots=1\n" * here + cluster.hostfile())
    (tmp_path / "join.py").write_text(JOINED)
    answer = ttlaunch_on(cluster)("run join.py --on lab --ranks 2", timeout_s=60)
    assert answer.status == 0, answer.stdout + answer.stderr
    lines = sorted(line[line.index("joined") :] for line in answer.stdout.splitlines() if "joined" in line)
    address = lines[0].split()[-2]
    interfaces = [line.split()[6] for line in lines]
    assert [f"joined 2 3.0 0 {group} 2 {interfaces[group]} {address} -" for group in (0, 1)] == lines
    assert interfaces[1] == "eth0"
    assert address.count(".") == 3
    assert not address.startswith("127.")
    wait_until(lambda: not leftovers(cluster), what="nothing is left on the hosts")


PRINTS = """\
import os, time
block, rank = bytearray(80_000_000), os.environ["RANK"]
print(f"step=3 loss=0.{rank}", flush=True)
progress = f"{os.environ['TTLAUNCH_RUN_DIR']}/records/rank-{rank}.progress.jsonl"
while '"usage"' not in open(progress).read():
    time.sleep(0.1)
"""


def test_numbers_that_a_script_prints_on_hosts_and_what_it_uses_come_home(make_cluster, ttlaunch_on, lab, tmp_path):
    cluster = make_cluster(hosts=2)
    lab(cluster.hostfile())
    (tmp_path / "work.py").write_text(PRINTS)
    run = ttlaunch_on(cluster)
    answer = run("run work.py --on lab --ranks 2", timeout_s=60)
    assert answer.status == 0, answer.stdout + answer.stderr
    events = [json.loads(line) for line in run("metrics --format json").stdout.splitlines()]
    printed = {event["rank"]: (event["step"], event["values"]) for event in events if event["kind"] == "printed"}
    assert {0: (3, {"loss": 0.0}), 1: (3, {"loss": 0.1})} == printed
    used = {event["rank"]: event["values"] for event in events if event["kind"] == "usage"}
    assert [0, 1] == sorted(used)
    assert all(values["memory_bytes"] > 80_000_000 and values["count"] == 1 for values in used.values())


@pytest.mark.parametrize("warm", ["", "--warm --env OMP_NUM_THREADS=1 "])
def test_the_report_says_what_of_the_start_over_hosts_took_how_long(make_cluster, ttlaunch_on, lab, tmp_path, warm):
    cluster = make_cluster(hosts=2)
    lab(cluster.hostfile())
    (tmp_path / "join.py").write_text(JOINED)
    run = ttlaunch_on(cluster)
    answer = run(f"run {warm}join.py --on lab --ranks 2", timeout_s=60)
    assert answer.status == 0, answer.stdout + answer.stderr
    said = json.loads(run("report --format json").stdout)["start_times"]
    names, seconds = zip(*((part["part"], part["seconds"]) for part in said["parts"]), strict=True)
    launcher = ("command", "checks", "connections", "hosts", "sync", "folder", "agents", "engine")
    assert (*launcher, "python", *(() if warm else ("torch",)), "setup", "joining") == names
    expected = ("output", bool(warm), cluster.hosts[said["rank"]])
    assert expected == (said["first_step"], said["is_warm"], said["host"])
    assert all(one >= 0 for one in seconds)
    assert said["seconds"] == pytest.approx(sum(seconds))
    assert all(one > 0 for name, one in zip(names, seconds, strict=True) if name in {"connections", "hosts", "sync"})


@pytest.fixture
def run_sum(ttlaunch_on, tmp_path):
    """`run_sum(cluster)`: the report of two ranks on the hosts of `lab` that have added their numbers over MPI."""

    def run(cluster):
        (tmp_path / "sum.py").write_text(SUM)
        answer = ttlaunch_on(cluster)("run sum.py --engine openmpi --on lab --ranks 2 --format json", timeout_s=60)
        assert answer.status == 0, answer.stderr
        return json.loads(answer.stdout)

    return run


def test_the_launching_machine_may_have_a_rank_too(make_cluster, run_sum, lab):
    cluster = make_cluster(hosts=1)
    lab("launcher slots=1\n" + cluster.hostfile())
    assert [row["host"] for row in run_sum(cluster)["ranks"]] == ["launcher", "node0"]


def test_users_and_homes_may_differ(make_cluster, ttlaunch_on, lab):
    cluster = make_cluster(hosts=2)
    cluster.add_user("node0", "alice")
    cluster.add_user("node1", "bob")
    lab("alice@node0 slots=1\nbob@node1 slots=1\n", remote_folder="~/my things/ttlaunch", **SYSTEM)
    answer = ttlaunch_on(cluster)("run --on lab --ranks 2 -- sh -c 'echo $USER $HOME $PWD'", timeout_s=60)
    assert answer.status == 0, answer.stderr
    lines = [line.split(" | ")[1] for line in answer.stdout.splitlines() if " | " in line]
    assert sorted(line.split()[0] for line in lines) == ["alice", "bob"]
    assert all(f"/home/{line.split()[0]}/my things/ttlaunch/releases/" in line for line in lines)


def test_names_may_mean_something_to_ssh_alone(make_cluster, run_sum, lab):
    cluster = make_cluster(hosts=2)
    names = {f"lab-{number}": cluster.ip(host) for number, host in enumerate(cluster.hosts)}
    blocks = [f"Host {name}\n  HostName {address}\n  HostKeyAlias {address}\n" for name, address in names.items()]
    cluster.path("launcher", "/root/.ssh/config").write_text("".join(blocks))
    lab("lab-0 slots=1\nlab-1 slots=1\n")
    assert [row["host"] for row in run_sum(cluster)["ranks"]] == ["lab-0", "lab-1"]


def test_interfaces_may_have_other_names_and_docker_is_ignored(make_cluster, run_sum, lab):
    cluster = make_cluster(hosts=2, interfaces={"node1": "enp5s0"})
    for host in cluster.hosts:
        cluster.add_interface(host, "docker0", "172.17.0.1/16")
    lab(cluster.hostfile())
    assert [row["host"] for row in run_sum(cluster)["ranks"]] == cluster.hosts


def test_nothing_starts_while_one_host_is_not_ready(make_cluster, ttlaunch_on, lab, tmp_path):
    cluster = make_cluster(hosts=2)
    cluster.stop_sshd("node1")
    lab(cluster.hostfile())
    answer = ttlaunch_on(cluster)("run fabric_minimal --on lab --ranks 2", timeout_s=60)
    assert answer.status == 4
    assert "connection refused on port 22" in answer.stderr
    assert not (tmp_path / "runs").exists()
    assert cluster.run("node0", ["ls", "-A", "/root/.ttlaunch"]).stdout == ""


def test_a_host_without_ranks_need_not_be_on(make_cluster, ttlaunch_on, lab):
    cluster = make_cluster(hosts=2)
    lab(cluster.hostfile())
    cluster.kill("node1")
    answer = ttlaunch_on(cluster)("run --on lab --ranks 1 -- hostname", timeout_s=60)
    assert (answer.status, "rank 0 rank | node0" in answer.stdout) == (0, True), answer.stderr


def test_the_command_of_a_run_can_be_pasted_afterwards(make_cluster, ttlaunch_on, lab, tmp_path):
    cluster = make_cluster(hosts=2)
    lab(cluster.hostfile())
    assert ttlaunch_on(cluster)("run --on lab --ranks 2 -- hostname", timeout_s=60).status == 0
    [command] = tmp_path.glob("runs/*/command.sh")
    again = cluster.run("launcher", ["sh", command], cwd="/")
    assert again.returncode == 0, again.stderr
    assert sorted(again.stdout.splitlines()) == ["rank 0 rank | node0", "rank 1 rank | node1"]


def test_a_run_may_last_longer_than_its_start_may(cluster4, ttlaunch_on, lab):
    lab(cluster4.hostfile())
    answer = ttlaunch_on(cluster4)("run --on lab --ranks 2 -- sh -c 'sleep 35; echo over'", timeout_s=90)
    assert answer.status == 0, answer.stderr
    both = answer.stdout.count("×2 ranks 0-1 | over\n")  # if they come at the same moment
    assert answer.stdout.count("| over\n") + both == 2


def test_a_script_that_no_host_would_have_is_refused(cluster4, ttlaunch_on, lab, tmp_path):
    lab(cluster4.hostfile())
    (tmp_path / "project").mkdir()
    shutil.move(tmp_path / "configurations", tmp_path / "project/configurations")
    (tmp_path / "outside.py").write_text("print('never')\n")
    (tmp_path / "project/link.py").symlink_to("../outside.py")
    for script in ("../outside.py", "link.py"):
        answer = ttlaunch_on(cluster4, cwd=tmp_path / "project")(f"run {script} --on lab --ranks 1")
        assert (answer.status, answer.stdout) == (3, "")
        assert f"error[P016]: {tmp_path}/outside.py is not copied to hosts\n" in answer.stderr


def test_a_program_that_a_host_lacks_is_refused(cluster4, ttlaunch_on, lab):
    lab(cluster4.hostfile())
    cluster4.run("node0", ["sh", "-c", "mkdir -p /opt/tool && printf '#!/bin/sh\necho here' > /opt/tool/t"], check=True)
    cluster4.run("node0", ["chmod", "+x", "/opt/tool/t"], check=True)
    answer = ttlaunch_on(cluster4)("run --on lab --ranks 2 -- /opt/tool/t")
    assert (answer.status, answer.stdout) == (2, "")
    assert answer.stderr.startswith("error[P009]: there is no program `/opt/tool/t` on `node1`\n")
    alone = ttlaunch_on(cluster4)("run --on lab --ranks 1 -- /opt/tool/t")
    assert (alone.status, "| here" in alone.stdout) == (0, True), alone.stderr


def test_no_secret_shows_on_a_command_line_in_a_log_or_in_a_file(make_cluster, ttlaunch_on, lab, tmp_path):
    cluster, canary = make_cluster(hosts=2), "canary-4711"
    lab(cluster.hostfile(), environment={"HF_TOKEN": "env:LAB_TOKEN", "WANDB_API_KEY": f"{canary}-literal"})
    work = tmp_path / "work.py"
    work.write_text(
        "import os, time\nprint(os.environ['TTLAUNCH_RANK'], os.environ['PLAIN'], len(os.environ['API_KEY']), len(os.environ['HF_TOKEN']), flush=True)\ntime.sleep(60)\n"
    )
    secret = {"LAB_TOKEN": f"{canary}-shell", "TT_SECRET": f"{canary}-forwarded", "API_KEY": f"{canary}-env"}
    run = ttlaunch_on(cluster).start(
        "run --on lab --ranks 2 --env API_KEY --env PLAIN=7 -- python3 work.py",
        environment=secret,
        stdout=subprocess.PIPE,
    )
    lines = []
    while len([line for line in lines if line.endswith(f" 7 {len(canary) + 4} {len(canary) + 6}\n")]) < 2:
        lines.append(run.stdout.readline())
        assert lines[-1], (lines, run.stderr.read())
    shown = [words for host in ("launcher", *cluster.hosts) for words in cluster.pids(host).values()]
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=30)
    assert run.returncode == 130
    assert shown
    assert [words for words in shown if canary in words] == []
    shutil.rmtree(tmp_path / "configurations")
    places = [tmp_path, *(cluster.path(host, "/root/.ttlaunch/runs") for host in cluster.hosts)]
    found = subprocess.run(["grep", "-rl", canary, *places], capture_output=True, text=True, check=False)
    assert found.stdout == ""


def test_checkpoints_come_home_and_training_goes_on_from_them_on_hosts(make_cluster, ttlaunch_on, lab, tmp_path):
    cluster = make_cluster(hosts=2)
    lab(cluster.hostfile())
    run = ttlaunch_on(cluster)
    settings = "--set training_config.steps=6 --set checkpoint_config.interval=2 --format json"
    settings += " --set multihost_config.num_workers=2"  # each of which saves a part
    whole = run(f"run fully_sharded --on lab {settings}", timeout_s=120)
    assert whole.status == 0, whole.stderr
    [folder] = tmp_path.glob("runs/*/checkpoints")
    assert [path.name for path in folder.glob("*.tmp")] == []
    step_4 = folder / "step-4"
    assert (step_4 / "manifest.json").is_file()
    again = run(f"run fully_sharded --on lab {settings} --resume {step_4.relative_to(tmp_path)}", timeout_s=120)
    assert digest(again) == digest(whole)


def test_ranks_use_the_interpreter_that_the_cluster_names(make_cluster, ttlaunch_on, lab, tmp_path):
    """It has an environment of its own: that of the launching machine is there, too, and ranks would find it."""
    cluster = make_cluster(hosts=2)
    for host in cluster.hosts:
        cluster.run(host, [sys._base_executable, "-m", "venv", "--without-pip", "/opt/python"], check=True)
    lab(cluster.hostfile(), python="/opt/python/bin/python")
    (tmp_path / "who.py").write_text("import sys; print('I am', sys.prefix)\n")
    answer = ttlaunch_on(cluster)("run who.py --on lab --ranks 2", timeout_s=60)
    assert answer.status == 0, answer.stderr
    both = answer.stdout.count("×2 ranks 0-1 | I am /opt/python\n")  # if they come at the same moment
    assert answer.stdout.count("| I am /opt/python\n") + both == 2


def test_hosts_that_share_the_folder_of_a_run_send_each_their_own_ranks_files(make_cluster, ttlaunch_on, lab, tmp_path):
    """Each agent sees the files of all ranks there, and the launcher refuses those of another host."""
    cluster = make_cluster(hosts=2, shared_folder="/root/shared")
    lab(cluster.hostfile(), remote_folder="/root/shared/ttlaunch")
    settings = f"{STEPS} --set multihost_config.num_workers=2 --set checkpoint_config.interval=2"
    answer = ttlaunch_on(cluster)(f"run fully_sharded --on lab {settings} --format json", timeout_s=120)
    assert answer.status == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert [("done", 4), ("done", 4)] == [(row["state"], row["step"]) for row in report["ranks"]]
    [run] = [path for path in (tmp_path / "runs").glob("[!.]*") if path.is_dir()]
    assert ["step-2", "step-4"] == sorted(path.name for path in (run / "checkpoints").iterdir())
    assert not (run / "events.jsonl").read_text().count("host_joined_again")
