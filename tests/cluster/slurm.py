"""Slurm on the machines of a test cluster: munged everywhere, slurmctld on node0, a slurmd on every host.

    with slurm_cluster(hosts=4) as slurm:
        slurm.run("launcher", ["srun", "-N4", "hostname"])
        slurm.kill("slurmd", "node1")

The launcher is a login node: it has Slurm's commands and the key of munge, and runs no job. Each machine has its own
/etc/slurm, with its sockets and state, so that the commands work everywhere without a variable. Nothing is left when
the cluster ends, because every daemon ends with its machine and every file lies in the cluster's folder.
"""

import os
import shlex
import signal
import time
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.hosts import Cluster
from tests.cluster.keeper import wait_until
from tests.cluster.layout import LAUNCHER
from tests.cluster.needs import find_tool, missing_tools

CONTROLLER = "node0"
FOLDER = "/etc/slurm"
SHARED = "/root/shared"
"""A folder that all machines see and may write, as the homes of most Slurm clusters."""

GPUS = 2
"""Devices of each host. They lead to /dev/null: Slurm counts them and sets their variables, and nothing opens them."""

CPUS = 8
REQUEUE_PAUSE_S = 10
"""How long Slurm waits before it starts a requeued job again: as long as credentials of a job are valid, by default 120 s."""

_STORED_WITHIN_S = 7
_OWN = f"{FOLDER}/own"
_TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo", "squeue")

_CONF = """\
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={own}/munge.socket,cred_expire={pause}
CredType=cred/munge
StateSaveLocation={own}/state
SlurmdSpoolDir={own}/spool
SlurmctldPidFile={own}/slurmctld.pid
SlurmdPidFile={own}/slurmd.pid
SlurmctldLogFile={own}/slurmctld.log
SlurmdLogFile={own}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
GresTypes=gpu
MpiDefault=none
ReturnToService=1
SlurmctldTimeout=30
SlurmdTimeout=6
MessageTimeout=3
KillWait=2
MinJobAge=30
NodeName={nodes} CPUs={cpus} RealMemory=1000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=debug Nodes={nodes} Default=YES MaxTime=INFINITE DefaultTime=60 State=UP
PartitionName=short Nodes={nodes} MaxTime=5 State=UP
PartitionName=closed Nodes={nodes} State=DOWN
"""
_CGROUP = "CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainRAMSpace=no\n"  # test hosts mount no cgroups


def why_no_slurm():
    """The reason in words, or an empty text."""
    missing = missing_tools(*_TOOLS)
    return f"these tests need {missing} (Debian: slurm-wlm, munge)" if missing else ""


@contextmanager
def slurm_cluster(*, hosts=4, **options):
    """Start hosts with Slurm on them and give the `Slurm`, every host idle; `options` are those of `Cluster`."""
    with Cluster(hosts=hosts, **{"shared_folder": SHARED} | options) as cluster:
        slurm = Slurm(cluster)
        slurm.start()
        yield slurm


class Slurm:
    """The daemons of one cluster. `cluster` has the hosts, and `run` runs a command on any machine."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.run = cluster.run
        self._key = os.urandom(1024)

    def start(self):
        """Start all daemons, and return when every host can take a job."""
        for machine in (LAUNCHER, *self.cluster.hosts):
            self._lay_out(machine)
            self.start_munged(machine)
        self.start_slurmctld()
        for host in self.cluster.hosts:
            self.start_slurmd(host)
        wait_until(lambda: {"idle"} == set(self.states().values()), what="every host of Slurm is idle")

    def states(self):
        """The state of each host in Slurm's words, without the marks that say how current it is; empty without slurmctld."""
        answer = self.run(LAUNCHER, ["sinfo", "--noheader", "--Node", "--partition=debug", "--format=%N %T"])
        return {host: state.rstrip("*~#!%$@^-") for host, state in map(str.split, answer.stdout.splitlines())}

    def queue(self):
        """A line for each job that Slurm has not forgotten, also of those that have not ended everywhere."""
        answer = self.run(LAUNCHER, ["squeue", "--noheader", "--states=all", "--format=%i %T %r"])
        lines = answer.stdout.splitlines()
        return [line for line in lines if line.split()[1] in {"PENDING", "RUNNING", "COMPLETING", "SUSPENDED"}]

    def update_host(self, host, **changes):
        """`update_host("node1", State="DRAIN", Reason="a test")`, as an administrator does it."""
        words = [f"{key}={value}" for key, value in changes.items()]
        self._do(CONTROLLER, "scontrol", "update", f"NodeName={host}", *words)

    def start_munged(self, machine):
        files = {"key-file": "munge.key", "socket": "munge.socket", "log-file": "munge.log", "pid-file": "munge.pid"}
        files["seed-file"] = "munge.seed"
        self._do(machine, "munged", "--force", *(f"--{option}={_OWN}/{name}" for option, name in files.items()))

    def start_slurmctld(self):
        self._do(CONTROLLER, "slurmctld")

    def start_slurmd(self, host):
        self._do(host, "slurmd")

    def kill(self, daemon, machine):
        """Kill a daemon of Slurm on one machine; the steps of jobs go on without it.

        The controller stores its jobs some seconds after they have changed, and a killed one has forgotten the rest: it is given the time.
        """
        if daemon == "slurmctld":
            time.sleep(_STORED_WITHIN_S)
        for pid, command in self.cluster.pids(machine).items():
            if Path(command.split(" ")[0]).name == daemon:
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.runs(daemon, machine), what=f"{daemon} of {machine} ends")

    def runs(self, daemon, machine):
        return any(Path(command.split(" ")[0]).name == daemon for command in self.cluster.pids(machine).values())

    def cancel_all(self, *, timeout_s=20):
        """End every job, and return when nothing of them is left in the queue."""
        self.run(LAUNCHER, ["scancel", "--user=root"])
        wait_until(lambda: not self.queue(), what="the queue of Slurm is empty", timeout_s=timeout_s)

    def offer_commands(self, folder):
        """Put programs into a folder that run Slurm's commands on the launcher, for tests that call them in this process."""
        for name in ("srun", "salloc", "scontrol", "squeue", "scancel"):
            script = shlex.join([*self.cluster.argv(LAUNCHER, find_tool(name), cwd="/")])
            (folder / name).write_text(f'#!/bin/sh\nexec {script} "$@"\n', encoding="utf-8")
            (folder / name).chmod(0o755)

    def logs(self):
        """The end of what each daemon has logged, by machine and daemon."""
        found = {}
        for machine in (LAUNCHER, *self.cluster.hosts):
            folder = self.cluster.path(machine, _OWN)
            for log in sorted(folder.glob("*.log")):
                found[f"{machine}: {log.name}"] = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        return found

    def _lay_out(self, machine):
        """Give a machine its own /etc/slurm. The files lie on a disk in memory, and are gone with the machine's mounts."""
        self._do(machine, "mount", "-t", "tmpfs", "-o", "mode=755,size=64m", "slurm", FOLDER)
        self._do(machine, "mkdir", "-p", f"{_OWN}/state", f"{_OWN}/spool")
        folder = self.cluster.path(machine, FOLDER)
        nodes = ",".join(self.cluster.hosts)
        conf = _CONF.format(own=_OWN, controller=CONTROLLER, nodes=nodes, cpus=CPUS, gpus=GPUS, pause=REQUEUE_PAUSE_S)
        devices = [f"{_OWN}/gpu{number}" for number in range(GPUS)]
        gres = "".join(f"Name=gpu File={path}\n" for path in devices)
        files = {"slurm.conf": conf, "cgroup.conf": _CGROUP, "gres.conf": gres}
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        for path in devices:
            (folder / "own" / Path(path).name).symlink_to("/dev/null")
        key = folder / "own/munge.key"
        key.touch(mode=0o600)
        key.write_bytes(self._key)

    def _do(self, machine, *command):
        # A daemon keeps the pipes of the program that started it, so nothing is captured.
        log = self.cluster.state / "logs" / f"slurm-{machine}"
        with log.open("a", encoding="utf-8") as file:
            done = self.run(machine, [find_tool(command[0]), *command[1:]], stdout=file, stderr=file)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} on {machine}: {log.read_text(encoding='utf-8').strip()[-500:]}")
