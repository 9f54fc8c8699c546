"""`ttlaunch run --on slurm`: hosts are asked for, used and given back; what goes wrong is named, and nothing is left."""

import contextlib
import json
import os
import re
import signal

import pytest

from tests.cluster.keeper import wait_until
from tests.cluster.needs import find_tool
from tests.cluster.slurm import SHARED

pytestmark = [pytest.mark.cluster, pytest.mark.mpi]

WHERE = """\
import os, socket
print(os.environ["RANK"], socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES"), "SLURM_STEP_ID" in os.environ)
"""
WAIT = """\
import os, time
print("up", os.environ["RANK"], flush=True)
time.sleep(600)
"""
STEPS = "--set training_config.steps=4 --set training_config.validation_interval=4"
DAEMONS = ("sshd", "/usr/sbin/sshd", "slurmctld", "slurmd", "munged", "/usr/sbin/slurm", "/usr/sbin/munged")


@pytest.fixture
def ttlaunch(slurm4, ttlaunch_on, tmp_path):
    (tmp_path / "where.py").write_text(WHERE)
    (tmp_path / "wait.py").write_text(WAIT)
    return ttlaunch_on(slurm4.cluster)


def leftovers(slurm):
    """Processes on the hosts besides those of Slurm and sshd, folders in shared memory, and jobs in the queue."""
    found = list(slurm.queue())
    for host in slurm.cluster.hosts:
        found += [
            (host, words) for words in slurm.cluster.pids(host).values() if words and not words.startswith(DAEMONS)
        ]
        found += [(host, name) for name in slurm.cluster.run(host, ["ls", "/dev/shm"]).stdout.split()]
    return found


def assert_nothing_is_left(slurm, *, timeout_s=20):
    try:
        wait_until(lambda: not leftovers(slurm), what="nothing is left", timeout_s=timeout_s)
    except TimeoutError:
        assert [] == leftovers(slurm)


def started(ttlaunch, line):
    """Start a run and return its process when every rank is up."""
    process = ttlaunch.start(line)
    up = set()
    while len(up) < 2:
        text = process.stdout.readline()
        assert text, process.stderr.read()
        up |= set(re.findall(r"up (\d)", text))
    return process


def test_a_script_has_a_rank_on_each_host_that_slurm_gives_and_gives_it_back(slurm4, ttlaunch):
    answer = ttlaunch("run where.py --on slurm:debug --nodes 3 --time 5")
    assert 0 == answer.status, answer.stderr
    found = sorted(re.findall(r"\| (\d) (node\d) (\S+) (\S+)", answer.stdout))
    assert [("0", "node0", "None", "False"), ("1", "node1", "None", "False"), ("2", "node2", "None", "False")] == found
    assert_nothing_is_left(slurm4)


def test_devices_of_the_job_are_those_of_its_ranks(slurm4, ttlaunch):
    answer = ttlaunch("run where.py --on slurm --nodes 2 --gres gpu:2")
    assert 0 == answer.status, answer.stderr
    found = sorted(re.findall(r"\| (\d) (node\d) (\S+)", answer.stdout))
    assert [("0", "node0", "0,1"), ("1", "node0", "0,1"), ("2", "node1", "0,1"), ("3", "node1", "0,1")] == found
    assert_nothing_is_left(slurm4)


BINDINGS = """\
mesh_graph_desc_path: mgd.yaml
rank_bindings:
  - {{rank: 0, mesh_id: 0, env_overrides: {{CUDA_VISIBLE_DEVICES: "{0}"}}}}
  - {{rank: 1, mesh_id: 1, env_overrides: {{CUDA_VISIBLE_DEVICES: "{1}"}}}}
"""
MESHES = """\
ChipSpec: {arch: cuda, ethernet_ports: {N: 1, E: 1, S: 1, W: 1}}
Board: [{name: b, type: Mesh, topology: [1, 1]}]
Mesh:
  - {id: 0, board: b, device_topology: [1, 1], host_topology: [1, 1]}
  - {id: 1, board: b, device_topology: [1, 1], host_topology: [1, 1]}
RelaxedGraph: []
"""


def test_bindings_name_devices_that_the_job_has_on_each_of_its_hosts(slurm4, ttlaunch):
    """Another job has device 0 of the first host, so this one has device 1 there and 0 on the second host."""
    (ttlaunch.cwd / "mgd.yaml").write_text(MESHES)
    run = f"{ttlaunch.python} -m ttlaunch run where.py --on slurm --rank-bindings"
    for name, devices in (("good", (1, 0)), ("counted", (0, 0)), ("first", (7, 0)), ("second", (1, 1))):
        (ttlaunch.cwd / f"{name}.yaml").write_text(BINDINGS.format(*devices))
    inner = "; ".join(f"{run} {name}.yaml; echo status $?" for name in ("good", "counted", "first", "second"))
    words = ["salloc", "--quiet", "--nodes=2", "--nodelist=node0,node1", "--ntasks-per-node=1", "--gres=gpu:1"]
    other = ["salloc", "--quiet", "--nodelist=node0", "--gres=gpu:1", "sh", "-c", "echo ready; read line"]
    with slurm4.cluster.popen("launcher", other, stdin=-1, stdout=-1) as first:
        assert "ready" == first.stdout.readline().strip()
        answer = slurm4.run("launcher", [*words, "sh", "-c", inner], cwd=ttlaunch.cwd)
        first.stdin.close()
    assert ["0", "0", "3", "3"] == re.findall(r"status (\d)", answer.stdout), answer.stderr
    assert sorted(re.findall(r"\| (\d node\d \d)", answer.stdout)) == [
        "0 node0 0",
        "0 node0 1",
        "1 node1 0",
        "1 node1 0",
    ]
    assert re.findall(r"error\[(P072)\]: rank (\d) names device (\d), .* on `(node\d)`", answer.stderr) == [
        ("P072", "0", "7", "node0"),
        ("P072", "1", "1", "node1"),
    ]
    assert re.findall("the job has .*", answer.stderr) == ["the job has 1", "the job has 0"]
    assert_nothing_is_left(slurm4)


def test_a_recipe_has_the_bits_that_it_has_on_one_machine(slurm4, ttlaunch):
    there = ttlaunch(f"run data_parallel {STEPS} --on slurm:debug --nodes 2 --format json", timeout_s=120)
    assert 0 == there.status, there.stderr
    here = ttlaunch(f"run data_parallel --ranks 1 {STEPS} --format json", timeout_s=120)
    digests = {json.loads(answer.stdout)["parameters_sha256"] for answer in (there, here)}
    assert 1 == len(digests)
    assert_nothing_is_left(slurm4)


def test_inside_a_job_its_hosts_are_used_and_kept(slurm4, ttlaunch):
    words = ["salloc", "--quiet", "--nodes=2", "--ntasks=3", "--ntasks-per-node=2", "sh", "-c"]
    inner = f"{ttlaunch.python} -m ttlaunch run where.py --ranks 3 --on slurm --format concise; squeue --noheader --format=%T"
    answer = slurm4.run("launcher", [*words, inner], cwd=ttlaunch.cwd)
    assert 0 == answer.returncode, answer.stderr
    found = sorted(re.findall(r"(\d) (node\d) (\S+) (\S+)", answer.stdout))
    assert [("0", "node0", "None", "False"), ("1", "node0", "None", "False"), ("2", "node1", "None", "False")] == found
    assert "RUNNING" == answer.stdout.split()[-1]
    assert_nothing_is_left(slurm4)


def test_the_plan_shows_the_whole_request_and_asks_for_nothing(slurm4, ttlaunch):
    answer = ttlaunch("plan data_parallel --on slurm:debug --nodes 2 --time 30 --gres gpu:1 --account lab --qos high")
    assert 0 == answer.status, answer.stderr
    request = (
        "--partition=debug --nodes=2 --ntasks=2 --ntasks-per-node=1 --time=30 --gres=gpu:1 --account=lab --qos=high"
    )
    assert f"Slurm chooses the hosts: {request}" in answer.stdout
    assert "" == slurm4.run("launcher", ["squeue", "--noheader", "--states=all", "--format=%k"]).stderr
    assert [] == slurm4.queue()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run where.py --on slurm:nope", "error[H046]: Slurm gives no hosts: invalid partition specified: nope"),
        ("run where.py --on slurm:closed", "error[H046]: Slurm gives no hosts: the partition is down (PartitionDown)"),
        ("run where.py --on slurm --nodes 9", "error[H046]: Slurm gives no hosts: "),
        (
            "run where.py --on slurm:short --time 30",
            "error[H046]: Slurm gives no hosts: the partition does not give hosts for so long",
        ),
        ("run where.py --on slurm --gres gpu:9", "error[H046]: Slurm gives no hosts: "),
        ("run where.py --on slurm --gres zork:1", "error[H046]: Slurm gives no hosts: "),
    ],
)
def test_a_request_that_slurm_will_never_meet_is_refused_and_leaves_the_queue(slurm4, ttlaunch, line, message):
    answer = ttlaunch(line)
    assert 4 == answer.status, answer.stderr
    assert message in answer.stderr
    assert "Slurm was asked for: --" in answer.stderr
    assert_nothing_is_left(slurm4)


def test_an_allocation_with_fewer_slots_than_ranks_is_refused(slurm4, ttlaunch):
    inner = f"{ttlaunch.python} -m ttlaunch run where.py --ranks 3 --on slurm"
    answer = slurm4.run(
        "launcher", ["salloc", "--quiet", "--nodes=2", "--ntasks=2", "sh", "-c", inner], cwd=ttlaunch.cwd
    )
    assert 3 == answer.returncode
    assert "error[P002]" in answer.stderr
    assert_nothing_is_left(slurm4)


def test_without_slurms_commands_the_message_says_where_they_are(slurm4, ttlaunch):
    words = ["env", "PATH=/nonexistent", ttlaunch.python, "-m", "ttlaunch", "run", "where.py", "--on", "slurm"]
    answer = slurm4.run("launcher", words, cwd=ttlaunch.cwd)
    assert (4, True) == (answer.returncode, "error[H043]" in answer.stderr), answer.stderr


def test_a_missing_srun_is_named_before_slurm_is_asked_for_hosts_and_in_a_job(slurm4, ttlaunch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/salloc").symlink_to(find_tool("salloc"))
    words = ["env", f"PATH={tmp_path}/bin", ttlaunch.python, "-m", "ttlaunch", "run", "where.py", "--on", "slurm"]
    answer = slurm4.run("launcher", words, cwd=ttlaunch.cwd)
    assert 4 == answer.returncode
    assert answer.stderr.startswith("error[H043]: this machine has no `srun`, with which they are reached"), (
        answer.stderr
    )
    inside = ["salloc", "--quiet", "--nodes=2", "--ntasks=2", *words]
    answer = slurm4.run("launcher", inside, cwd=ttlaunch.cwd)
    assert (4, True) == (answer.returncode, "srun cannot be started on this machine: no such file" in answer.stderr)
    assert "hint: run ttlaunch where Slurm's commands are installed, such as a login node" in answer.stderr
    assert_nothing_is_left(slurm4)


def test_a_machine_without_a_configuration_of_slurm_is_named(slurm4, ttlaunch):
    answer = ttlaunch("run where.py --on slurm", environment={"SLURM_CONF": "/nowhere"})
    assert 4 == answer.status
    assert answer.stderr.startswith("error[H049]: Slurm's commands find no configuration on this machine"), (
        answer.stderr
    )


def test_a_machine_without_munge_is_named(slurm4, ttlaunch):
    slurm4.kill("munged", "launcher")
    try:
        answer = ttlaunch("run where.py --on slurm")
    finally:
        slurm4.start_munged("launcher")
    assert (4, True) == (answer.status, "error[H044]" in answer.stderr), answer.stderr


def test_a_controller_that_does_not_answer_is_named(slurm4, ttlaunch):
    slurm4.kill("slurmctld", "node0")
    try:
        answer = ttlaunch("run where.py --on slurm")
    finally:
        slurm4.start_slurmctld()
        wait_until(lambda: {"idle"} == set(slurm4.states().values()), what="the controller is back", timeout_s=60)
    assert (4, True) == (answer.status, "error[H045]" in answer.stderr), answer.stderr


def test_a_job_that_waits_is_reported_with_the_reason_and_ctrl_c_cancels_it(slurm4, ttlaunch):
    holder = slurm4.cluster.popen("launcher", ["salloc", "--quiet", "--nodes=4", "--exclusive", "sleep", "600"])
    wait_until(lambda: any("RUNNING" in line for line in slurm4.queue()), what="all hosts are taken")
    process = ttlaunch.start("run where.py --on slurm:debug --nodes 2")
    said = process.stderr.readline()
    assert re.fullmatch(
        r"Slurm job \d+ waits in the queue: the hosts that it needs are in use; Ctrl-C cancels it\n", said
    )
    process.send_signal(signal.SIGINT)
    assert 130 == process.wait(20)
    wait_until(lambda: 1 == len(slurm4.queue()), what="only the other job is left")
    holder.terminate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_launcher_leaves_no_job_and_no_process(slurm4, ttlaunch, number):
    process = started(ttlaunch, "run wait.py --on slurm --nodes 2")
    process.send_signal(number)
    process.wait(60)
    assert_nothing_is_left(slurm4, timeout_s=60)


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_a_cancelled_job_is_named_as_the_cause_and_leaves_nothing(slurm4, ttlaunch, number):
    """Slurm signals all processes of a job where it follows them by control groups, and here only the shells of its steps."""
    process = started(ttlaunch, "run wait.py --on slurm --nodes 2 --lease 600")
    job = slurm4.queue()[0].split()[0]
    if number is not None:
        for host in ("node0", "node1"):
            for pid, words in slurm4.cluster.pids(host).items():
                if words and not words.startswith(DAEMONS):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
    slurm4.run("launcher", ["scancel", job])
    _, stderr = process.communicate(timeout=60)
    assert 7 == process.returncode
    assert f"Slurm has ended job {job}: CANCELLED" in stderr
    assert_nothing_is_left(slurm4)


def test_a_host_that_an_administrator_takes_down_is_named_with_slurms_reason(slurm4, ttlaunch):
    process = started(ttlaunch, "run wait.py --on slurm --nodes 2")
    try:
        slurm4.update_host("node1", State="DOWN", Reason="a test")
        _, stderr = process.communicate(timeout=90)
    finally:
        slurm4.update_host("node1", State="RESUME")
    assert 7 == process.returncode
    assert "node1" in stderr
    assert "a test" in stderr
    assert_nothing_is_left(slurm4, timeout_s=40)


def test_no_value_of_the_user_is_in_a_command_line_or_in_slurms_records(slurm4, ttlaunch):
    line = "run --env HF_TOKEN=hf_of_the_environment --on slurm --nodes 2 wait.py -- --key hf_of_an_argument"
    process = started(ttlaunch, line)
    shown = [slurm4.run("launcher", ["scontrol", "show", what]).stdout for what in ("job", "step")]
    shown += [words for words in slurm4.cluster.pids("launcher").values() if "srun" in words or "salloc" in words]
    for host in slurm4.cluster.hosts:  # the ranks' own command lines have their arguments
        shown += [words for words in slurm4.cluster.pids(host).values() if "wait.py" not in words]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert any("srun" in words for words in shown)
    assert [] == [words for words in shown if "hf_of" in words]
    assert_nothing_is_left(slurm4)


def test_drained_hosts_finish_what_they_run(slurm4, ttlaunch):
    process = started(ttlaunch, "run wait.py --on slurm --nodes 2")
    try:
        slurm4.update_host("node1", State="DRAIN", Reason="a test")
        wait_until(lambda: slurm4.states()["node1"] == "draining", what="node1 is drained")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        slurm4.update_host("node1", State="RESUME")
    assert 130 == process.returncode
    assert_nothing_is_left(slurm4)


def test_a_run_goes_on_without_a_slurmd_and_its_end_leaves_nothing(slurm4, ttlaunch):
    """Steps that have been started do not need it, and Slurm counts the host as lost only for jobs to come."""
    process = started(ttlaunch, "run wait.py --on slurm --nodes 2")
    slurm4.kill("slurmd", "node1")
    try:
        wait_until(lambda: slurm4.states()["node1"].startswith("down"), what="Slurm misses node1", timeout_s=60)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert 130 == process.returncode
        assert_nothing_is_left(slurm4, timeout_s=60)
    finally:
        slurm4.start_slurmd("node1")
        wait_until(lambda: {"idle"} == set(slurm4.states().values()), what="the host is back", timeout_s=60)


@pytest.fixture
def run_until_told(slurm4, ttlaunch):
    """The process of a run on two hosts that has begun, and what tells it to end."""
    may_end = f"{SHARED}/may-end"
    until_then = f'while not os.path.exists("{may_end}"):\n    time.sleep(0.1)'
    (ttlaunch.cwd / "wait.py").write_text(WAIT.replace("time.sleep(600)", until_then))
    yield started(ttlaunch, "run wait.py --on slurm --nodes 2"), lambda: slurm4.run("node0", ["touch", may_end])
    slurm4.run("node0", ["rm", may_end])


def assert_all_is_given_back(slurm):
    assert_nothing_is_left(slurm, timeout_s=60)
    wait_until(lambda: {"idle"} == set(slurm.states().values()), what="the controller is back", timeout_s=60)


def test_a_run_goes_on_while_the_controller_is_away(slurm4, run_until_told):
    process, let_end = run_until_told
    slurm4.kill("slurmctld", "node0")
    try:
        assert process.poll() is None
    finally:
        slurm4.start_slurmctld()
        let_end()
        _, stderr = process.communicate(timeout=60)
    assert 0 == process.returncode, stderr
    assert "H045" not in stderr
    assert_all_is_given_back(slurm4)


def test_a_job_whose_end_the_controller_does_not_take_is_named(slurm4, run_until_told):
    process, let_end = run_until_told
    slurm4.kill("slurmctld", "node0")
    try:
        let_end()
        _, stderr = process.communicate(timeout=120)
        assert 0 == process.returncode, stderr
        [job] = re.findall(r"warning\[H045\]: Slurm's controller has not said .* that job (\d+) has ended", stderr)
        assert f"`scancel {job}` gives them back" in stderr
    finally:
        slurm4.start_slurmctld()
        slurm4.cancel_all(timeout_s=120)  # a host that has not confirmed it is asked again only after a minute
    assert_all_is_given_back(slurm4)


def test_the_hosts_of_a_job_can_be_checked_and_filled_as_those_of_a_configuration(slurm4, ttlaunch):
    commands = ["doctor --on slurm", "sync --on slurm"]
    inner = " && ".join(f"{ttlaunch.python} -m ttlaunch {line}" for line in commands)
    answer = slurm4.run(
        "launcher", ["salloc", "--quiet", "--nodes=2", "--ntasks=2", "sh", "-c", inner], cwd=ttlaunch.cwd
    )
    assert 0 == answer.returncode, answer.stdout + answer.stderr
    assert "node1" in answer.stdout
    assert_nothing_is_left(slurm4)
    answer = ttlaunch("doctor --on slurm:debug")
    assert 2 == answer.status
    assert "`--on slurm` asks for hosts only for a run" in answer.stderr


def test_options_that_ask_for_hosts_are_refused_inside_a_job_and_without_slurm(slurm4, ttlaunch):
    inner = f"{ttlaunch.python} -m ttlaunch run where.py --on slurm --nodes 2"
    answer = slurm4.run("launcher", ["salloc", "--quiet", "--nodes=2", "sh", "-c", inner], cwd=ttlaunch.cwd)
    assert 2 == answer.returncode
    assert re.search(r"`--nodes` asks for hosts, and this shell is in Slurm job \d+, which has its own", answer.stderr)
    answer = ttlaunch("plan where.py --gres gpu:1")
    assert (2, True) == (answer.status, "`--gres` asks Slurm for hosts, and `--on local` names others" in answer.stderr)


# What every engine and every way to hosts has to do.

NASTY = """it's a "$HOME" `id`; {x} \\ * and
a second line"""


def test_a_value_reaches_the_ranks_whatever_it_holds(slurm4, ttlaunch):
    (ttlaunch.cwd / "say.py").write_text("import os\nprint(ascii(os.environ['NASTY']))\n")
    answer = ttlaunch(["run", "say.py", "--on", "slurm", "--nodes", "2", "--env", f"NASTY={NASTY}"])
    assert 0 == answer.status, answer.stderr
    assert ascii(NASTY) in answer.stdout


def test_logs_hold_what_ranks_print_byte_for_byte(slurm4, ttlaunch):
    garbage = bytes(range(256)) * 40
    (ttlaunch.cwd / "say.py").write_text("import sys\nsys.stdout.buffer.write(bytes(range(256)) * 40)\n")
    answer = ttlaunch("run say.py --on slurm --nodes 2 --format json")
    assert 0 == answer.status, answer.stderr
    logs = list((ttlaunch.cwd / "runs").glob("*/logs/rank-*.stdout"))
    assert [garbage, garbage] == [log.read_bytes() for log in logs]


def test_a_rank_that_exits_is_named_with_its_host_and_the_others_are_ended(slurm4, ttlaunch):
    (ttlaunch.cwd / "leave.py").write_text(
        "import os, subprocess, sys, time\nsubprocess.Popen(['setsid', 'sleep', '601'])\n"
        "sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)\n"
    )
    answer = ttlaunch("run leave.py --on slurm --nodes 2")
    assert (1, True) == (answer.status, "rank 1 (rank, node1) exited with status 7" in answer.stderr), answer.stderr
    assert_nothing_is_left(slurm4)  # what the ranks left behind has ended with them


def test_a_rank_that_is_killed_is_named_first(slurm4, ttlaunch):
    process = started(ttlaunch, "run wait.py --on slurm --nodes 2")
    slurm4.run("node1", ["sh", "-c", "kill -9 $(pgrep -f '[p]ython.*wait.py' | tail -n 1)"])
    _, stderr = process.communicate(timeout=60)
    assert (1, True) == (process.returncode, "rank 1 (rank, node1)" in stderr.splitlines()[0]), stderr
    assert_nothing_is_left(slurm4)


# Hosts that share the home, and restarts.

AGAIN = """\
import os, sys, time
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("start", start, os.environ["RANK"], flush=True)
sys.exit(3) if (start, os.environ["RANK"]) == ("0", "1") else time.sleep(600 if start == "0" else 0)
"""


def test_hosts_that_share_the_home_share_one_copy_of_the_code_and_keep_their_ranks_apart(
    make_slurm, ttlaunch_on, tmp_path
):
    slurm = make_slurm(hosts=3, shared_folder="/root/.ttlaunch")
    ttlaunch = ttlaunch_on(slurm.cluster)
    (tmp_path / "where.py").write_text(WHERE)
    for number in range(3):  # all hosts at once write what is new, and what is there already
        (tmp_path / "module.py").write_text(f"# {number // 2}\n")
        answer = ttlaunch("run where.py --on slurm --nodes 3")
        assert 0 == answer.status, answer.stderr
        found = re.findall(r"\| (\d) (node\d)", answer.stdout)
        assert [("0", "node0"), ("1", "node1"), ("2", "node2")] == sorted(found)
    (tmp_path / "leave.py").write_text(AGAIN)
    answer = ttlaunch("run leave.py --on slurm --nodes 3")
    assert (1, True) == (answer.status, "rank 1 (rank, node1) exited with status 3" in answer.stderr), answer.stderr
    releases = slurm.run("node2", ["sh", "-c", "ls -d /root/.ttlaunch/releases/*/"]).stdout.split()
    assert all("." not in release.rsplit("/", 2)[1] for release in releases), releases
    assert_nothing_is_left(slurm)


def test_a_restart_uses_the_hosts_that_the_job_has(slurm4, ttlaunch):
    (ttlaunch.cwd / "again.py").write_text(AGAIN)
    answer = ttlaunch("run again.py --on slurm --nodes 2 --max-restarts 1")
    assert 0 == answer.status, answer.stderr
    assert {"0", "1"} == set(re.findall(r"\| start 1 (\d)", answer.stdout)), answer.stdout
    assert_nothing_is_left(slurm4)


def test_a_cancelled_job_is_not_restarted(slurm4, ttlaunch):
    process = started(ttlaunch, "run wait.py --on slurm --nodes 2 --lease 600 --max-restarts 3")
    slurm4.cancel_all()
    _, stderr = process.communicate(timeout=120)
    assert (7, True) == (process.returncode, "CANCELLED" in stderr), stderr
    assert 1 == len(list((ttlaunch.cwd / "runs").glob("2*")))
    assert_nothing_is_left(slurm4)


def test_a_recipe_goes_on_without_a_host_that_slurm_takes_out_of_the_job(slurm4, ttlaunch):
    line = "run data_parallel --on slurm --nodes 2 --lease 4 --max-restarts 1 --format json"
    longer = "--set training_config.steps=3000 --set training_config.validation_interval=3000"
    process = ttlaunch.start(f"{line} {longer} --set checkpoint_config.interval=20")
    checkpoints = ttlaunch.cwd / "runs"
    wait_until(lambda: list(checkpoints.glob("*/checkpoints/step-*")), what="a checkpoint is complete", timeout_s=90)
    try:
        slurm4.update_host("node1", State="DOWN", Reason="a test")
        wait_until(lambda: 2 == len(list(checkpoints.glob("2*"))), what="the run is started again", timeout_s=90)
    finally:
        slurm4.update_host("node1", State="RESUME")
    again = max(checkpoints.glob("2*"))
    wait_until(lambda: list(again.glob("records/rank-0.progress.jsonl")), what="a rank is up", timeout_s=60)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=90)
    plan = json.loads((again / "plan.json").read_text())
    assert {"node0"} == {row["host"] for row in plan["ranks"]}
    assert 130 == process.returncode
    assert_nothing_is_left(slurm4)
