"""Other users of a host and other containers on it: what they make in shared folders neither stops, ends nor takes over a run."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.agent.test_agent import Hosted
from tests.running.conftest import StartedRun
from ttlaunch import contract
from ttlaunch.agent import claims, environments
from ttlaunch.engines.base import DaemonStart
from ttlaunch.engines.openmpi import OpenMpi, generation_of
from ttlaunch.hosts.transport.local import LocalTransport
from ttlaunch.running.agents.relay import Relay
from ttlaunch.running.runs.run_folder import scratch_folder

NOBODY = 65534
WITHIN_S = 60
STRANGER = f"""
import os, socket, sys
connection = socket.socket(socket.AF_UNIX)
os.setgid({NOBODY}); os.setuid({NOBODY})
connection.connect(sys.argv[1])
connection.settimeout(20)
try:
    connection.sendall(bytes.fromhex(sys.argv[2]))
    answer = connection.recv(1)
except ConnectionError:
    answer = b""
print(answer or "turned away")
"""


WAITS = """\
import os, pathlib, time
pathlib.Path("part-" + os.environ["RANK"]).write_text(str(os.getpid()))
os.replace("part-" + os.environ["RANK"], "up-" + os.environ["RANK"])
while not pathlib.Path("go").exists():
    time.sleep(0.05)
"""
PRIES = f"""
import os, signal, sys
pids, folders = map(str.split, sys.argv[1:])
os.setgid({NOBODY}); os.setuid({NOBODY})
def attempt(what, action, *arguments):
    try:
        print(what, action(*arguments))
    except PermissionError:
        pass
for pid in map(int, pids):
    for number in (0, signal.SIGSTOP, signal.SIGKILL):
        attempt(f"signal {{number}}", os.kill, pid, number)
    for name in ("environ", "mem", "maps", "syscall"):
        attempt(name, lambda path: open(path, "rb").read(1), f"/proc/{{pid}}/{{name}}")
    for name in ("fd", "map_files"):
        attempt(name, os.listdir, f"/proc/{{pid}}/{{name}}")
    attempt("fd 1", os.open, f"/proc/{{pid}}/fd/1", os.O_WRONLY)
    words = open(f"/proc/{{pid}}/cmdline").read()
    print(*(["the secret"] if "tell-nobody" in words else []), end="")
for folder in folders:
    attempt(folder, os.listdir, folder)
print("tried", len(pids), len(folders))
"""
"""Tries what another user might with the processes and folders of a run, and prints what the kernel allows."""


@pytest.fixture
def as_root(skip_or_fail):
    """Needs root, to be another user or another container."""
    if os.geteuid():
        skip_or_fail("not root: no other user and no container can be played here")


@pytest.fixture
def in_container(as_root, skip_or_fail):
    """`in_container(code)`: run Python among processes of its own, on the same file systems; returns what it printed."""
    words = ["unshare", "--pid", "--mount", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        skip_or_fail("no namespaces of process ids can be made here")

    def run(code, *arguments):
        words_of_python = [sys.executable, "-c", code, *map(str, arguments)]
        answer = subprocess.run(
            [*words, *words_of_python], capture_output=True, text=True, timeout=WITHIN_S, check=False
        )
        assert answer.returncode == 0, answer.stderr
        return answer.stdout.strip()

    return run


@pytest.fixture
def open_folder():
    """A folder that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="ttl-tests-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def hosted():
    """`hosted(folder)`: a run with an agent on this machine."""
    runs = []

    def make(folder, **options):
        runs.append(Hosted(folder, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def as_stranger(place, message=b""):
    """Connect to a socket as another user; returns what is said there."""
    words = [sys.executable, "-I", "-S", "-c", STRANGER, str(place), message.hex()]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert not answer.stderr
    return answer.stdout


def trap(path, kind):
    """Put something at the place where an agent wants its folder."""
    elsewhere = path.with_name("elsewhere")
    if kind == "file":
        path.touch()
    elif kind == "link":
        elsewhere.mkdir(mode=0o700)
        path.symlink_to(elsewhere)
    else:
        path.mkdir()
        path.chmod(0o777 if kind == "open" else 0o700)
    if kind == "another user's":
        os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("open", "its mode 0777 admits other users, and 0700 was expected"),
        ("another user's", f"it belongs to user {NOBODY}, and we are 0"),
        ("link", "what has this name is not a folder"),
        ("file", "what has this name is not a folder"),
    ],
)
def test_an_agent_uses_no_folder_that_another_user_made_for_it(as_root, hosted, tmp_path, kind, reason):
    path = tmp_path / "s-run"
    trap(path, kind)
    run = hosted(tmp_path, run_id="run")
    assert run.first == {"kind": "refused", "reason": f"{path}: {reason}"}
    path.unlink() if kind in ("link", "file") else shutil.rmtree(path)


@pytest.mark.parametrize("owner", [None, NOBODY])
def test_a_fifo_in_place_of_a_claim_stops_no_agent(as_root, hosted, tmp_path, owner):
    folder = tmp_path / "ttl-trap"
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / "agent.claim")
    if owner is not None:
        os.chown(folder, owner, owner)
    assert hosted(tmp_path).first["kind"] == "ready"


def test_a_link_in_place_of_a_claim_locks_and_removes_nothing(tmp_path):
    target = tmp_path / "target"
    target.touch()
    folder = tmp_path / "ttl-trap"
    folder.mkdir(mode=0o700)
    (folder / "agent.claim").symlink_to(target)
    assert claims.take_claims(str(folder)) is None
    claims.remove_abandoned(str(tmp_path))
    assert folder.is_dir()


def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "agent.claim").touch()
    (tmp_path / "ttl-link").symlink_to(elsewhere)
    claims.remove_abandoned(str(tmp_path))
    assert (elsewhere / "agent.claim").exists()


def test_another_user_who_reaches_an_agents_socket_is_turned_away(as_root, hosted, open_folder):
    run = hosted(open_folder)
    run.scratch.chmod(0o711)
    place = run.scratch / "agent"
    place.chmod(0o777)
    assert as_stranger(place) == "turned away\n"
    run.order("look", question=1)
    assert run.until("looked")[-1][0]["question"] == 1, "the launcher is still served"


def test_a_bridge_gives_nothing_to_a_socket_of_another_user(as_root, open_folder):
    with tempfile.TemporaryDirectory(dir=open_folder) as folder:
        Path(folder).chmod(0o777)
        code = "import os, socket, sys, time; os.setuid({}); s = socket.socket(1); s.bind(sys.argv[1]); s.listen(); print(1, flush=True); time.sleep(60)"
        place = f"{folder}/agent"
        with subprocess.Popen([sys.executable, "-c", code.format(NOBODY), place], stdout=subprocess.PIPE) as impostor:
            impostor.stdout.readline()
            try:
                with pytest.raises(PermissionError, match="another user listens in its place"):
                    claims.connect(place)
            finally:
                impostor.kill()


def test_another_user_who_reaches_the_relay_runs_no_command_on_a_host(as_root, open_folder):
    start = DaemonStart("/usr", "/usr/bin", {}, ("python3",))
    engine = OpenMpi("/usr/bin/mpirun", (5, 0, 11), generation_of((5, 0, 11)))
    transports = {"box": LocalTransport("box")}
    relay = Relay(transports, {"box": start}, engine=engine, scratch=open_folder, is_lost=lambda _: True)
    try:
        place = open_folder / "relay"
        place.chmod(0o777)
        command = contract.pack_frame({"host": "box", "command": f"touch {open_folder}/made"})
        assert as_stranger(place, command) == "turned away\n"
    finally:
        relay.close()
    assert not (open_folder / "made").exists()


def test_the_folder_of_a_live_run_survives_a_run_in_another_container(in_container):
    another_run = (
        "from ttlaunch.running.runs.run_folder import scratch_folder\n"
        "with scratch_folder() as folder: print(folder.parent)"
    )
    with scratch_folder() as folder:
        assert in_container(another_run) == str(folder.parent), "both use the same shared memory"
        assert folder.is_dir()


def test_the_folders_of_an_agent_survive_an_agent_in_another_container(in_container, hosted, tmp_path):
    run = hosted(tmp_path)
    shared = run.scratch.with_name("ttl-live")
    run.scratch.rename(shared)
    another_agent = (
        "import sys; from ttlaunch.agent import claims, start_agent\n"
        "claims.remove_abandoned(sys.argv[1]); start_agent._prune(sys.argv[2])"
    )
    for number in range(21):
        (tmp_path / f"runs/s{number:02}").mkdir()  # newer than the live run
    in_container(another_agent, tmp_path, tmp_path / "runs")
    assert shared.is_dir()
    assert run.folder.is_dir()
    assert not (tmp_path / "runs/s00").exists(), "the oldest that nobody uses is removed"
    shared.rename(run.scratch)


def test_the_environment_of_an_agent_counts_as_used_in_another_container(in_container, hosted, tmp_path):
    environment = tmp_path / "envs/abc-1"
    (environment / "bin").mkdir(parents=True)
    is_in_use = "import sys; from ttlaunch.agent import environments; print(environments.is_in_use(sys.argv[1]))"
    assert in_container(is_in_use, environment) == "False"
    hosted(tmp_path, python=str(environment / "bin/python"))
    assert in_container(is_in_use, environment) == "True"
    assert environments.is_in_use(str(environment))


def test_a_folder_that_nobody_claims_any_more_is_removed(tmp_path):
    folder = tmp_path / "ttl-run"
    first, second = (claims.claim(str(folder), name) for name in ("launcher", "agent"))
    os.close(first)
    claims.remove_abandoned(str(tmp_path))
    assert folder.is_dir(), "the other process goes on"
    os.close(second)
    claims.remove_abandoned(str(tmp_path))
    assert not folder.exists()


def test_a_launcher_in_another_container_is_not_called_dead(in_container, tmp_path):
    run = tmp_path / "runs/2026-01-01T00-00-00-aaaa"
    run.mkdir(parents=True)
    in_container(
        "import sys; from pathlib import Path; from ttlaunch.running.runs.launcher import write_launcher; write_launcher(Path(sys.argv[1]))",
        run,
    )
    state = "import sys; from pathlib import Path; from ttlaunch.running.runs.overview import summarise; print(summarise([Path(sys.argv[1])])[0].state)"
    answer = subprocess.run([sys.executable, "-c", state, str(run)], capture_output=True, text=True, check=True)
    assert answer.stdout == "elsewhere\n"


@pytest.mark.mpi
@pytest.mark.parametrize("options", [(), ("--warm",)], ids=["cold", "warm"])
def test_another_user_reads_nothing_of_the_processes_of_a_script_and_signals_none(
    as_root,
    open_folder,
    monkeypatch,
    options,
):
    monkeypatch.setenv("MY_TOKEN", "tell-nobody")
    (open_folder / "work.py").write_text(WAITS)
    run = StartedRun(open_folder, [*options, "-n", "2", "work.py"])
    try:
        ranks = {int(run.wait_for_file(f"up-{rank}")) for rank in (0, 1)}
        processes = {run.supervisor(), run.mpirun(), *run.processes()}
        assert ranks < processes
        assert any(b"tell-nobody" in Path(f"/proc/{pid}/environ").read_bytes() for pid in ranks), "ranks have it"
        folders = [run.run_folder, *run.scratch_folders()]
        assert len(folders) >= 2
        words = [sys.executable, "-I", "-S", "-c", PRIES, " ".join(map(str, processes)), " ".join(map(str, folders))]
        answer = subprocess.run(words, capture_output=True, text=True, timeout=WITHIN_S, check=False)
        assert (f"tried {len(processes)} {len(folders)}\n", "") == (answer.stdout, answer.stderr)
        (open_folder / "go").touch()
        assert run.ends(within_s=WITHIN_S) == 0, run.stderr
    finally:
        run.close()
