"""The commands of exported pods do what they are for, on hosts that have only what a pod has: the job's key and a hostfile."""

import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from tests.cluster.keeper import wait_until
from ttlaunch.cli.main import app

pytestmark = [pytest.mark.cluster, pytest.mark.mpi]

OPERATORS = {
    "K_MPI_JOB_ROLE": "launcher",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    "OMPI_MCA_orte_set_default_slots": "1",
}
"""What the MPI Operator sets in a launcher for Open MPI (pkg/controller/mpi_job_controller.go)."""
KEYS = {"jobset": ["-t", "ed25519"], "mpijob": ["-t", "ecdsa", "-b", "521", "-m", "PEM"]}
NAMES = {"jobset": "lab-worker-0-{}.lab", "mpijob": "lab-worker-{}.lab.default.svc"}
SCRIPT = """\
import os, socket
from mpi4py import MPI
print(socket.gethostname(), MPI.COMM_WORLD.rank, MPI.COMM_WORLD.allreduce(1), os.environ["LR"], os.environ["HF_TOKEN"])
"""


def containers(text):
    """The launcher's and the worker's container of an exported file."""
    (*_, job) = yaml.safe_load_all(text)
    if job["kind"] == "MPIJob":
        replicas = job["spec"]["mpiReplicaSpecs"]
        pods = [replicas[name]["template"]["spec"] for name in ("Launcher", "Worker")]
    else:
        jobs = {one["name"]: one["template"]["spec"]["template"]["spec"] for one in job["spec"]["replicatedJobs"]}
        pods = [jobs["launcher"], jobs["worker"]]
    return [pod["containers"][0] for pod in pods]


def words(container):
    """The command line of a container after Kubernetes has expanded it."""
    return [word.replace("$$", "$") for word in [*container["command"], *container.get("args", [])]]


def give_key(cluster, host, folder):
    """Make ~/.ssh of a host what the mounted Secret makes it."""
    script = f"rm -rf ~/.ssh/* && cp {folder}/id_rsa {folder}/id_rsa.pub ~/.ssh && cp ~/.ssh/id_rsa.pub ~/.ssh/authorized_keys"
    done = cluster.run(host, ["sh", "-c", f"{script} && chmod 600 ~/.ssh/* && chmod 1777 ~/.ssh"])
    assert 0 == done.returncode, done.stderr


@pytest.mark.parametrize("to", ["jobset", "mpijob"])
def test_the_commands_of_exported_pods_run_a_script_on_every_worker(make_cluster, tmp_path, monkeypatch, to):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "where.py").write_text(SCRIPT)
    line = f"export where.py --to {to} --image i --hosts 2 --name lab --ranks 2 --env LR=1e-3 --env HF_TOKEN"
    exported = CliRunner().invoke(app, line.split())
    assert 0 == exported.exit_code, exported.stderr
    launcher, worker = containers(exported.stdout)
    keys = tmp_path / "keys"
    keys.mkdir()
    subprocess.run(["ssh-keygen", "-q", *KEYS[to], "-N", "", "-f", str(keys / "id_rsa")], check=True)
    cluster = make_cluster(hosts=2)
    for host in cluster.hosts:
        cluster.stop_sshd(host)
        secret = cluster.path(host, "/root/key")
        secret.mkdir()
        for name in ("id_rsa", "id_rsa.pub"):
            (secret / name).write_bytes((keys / name).read_bytes())
        give_key(cluster, host, "/root/key")
        cluster.run(host, ["sh", "-c", "mkdir -p /etc/ssh && : >/etc/ssh/sshd_config"])
        cluster.popen(host, words(worker))
        address = f"</dev/tcp/{cluster.ip(host)}/22"
        wait_until(
            lambda address=address: cluster.run("launcher", ["bash", "-c", address]).returncode == 0,
            what="a worker is ready",
        )
    give_key(cluster, "launcher", keys)
    hosts = [(cluster.ip(host), NAMES[to].format(number)) for number, host in enumerate(cluster.hosts)]
    cluster.set_hosts_file("launcher", "127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for ip, name in hosts))
    (tmp_path / "hostfile").write_text("".join(f"{name} slots=1\n" for _, name in hosts))
    (tmp_path / "ssh").mkdir()
    command = [str(tmp_path / "hostfile") if word == "/etc/mpi/hostfile" else word for word in words(launcher)]
    at = command.index("ttlaunch")
    command[at : at + 1] = [sys.executable, "-m", "ttlaunch"]
    # The launcher of a test cluster sees the real /etc, so what the pod writes there is kept in a folder of this test.
    private = ["unshare", "--mount", "sh", "-c", f'mount --bind {tmp_path}/ssh /etc/ssh && exec "$@"', "sh"]
    variables = {"LR": "1e-3", "HF_TOKEN": "t0ken", **(OPERATORS if to == "mpijob" else {})}
    done = cluster.run(
        "launcher",
        [*private, *command],
        env=cluster.environment("launcher") | variables | {"NO_COLOR": "1"},
        timeout=120,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    for number, host in enumerate(cluster.hosts):
        assert f"{host} {number} 2 1e-3 t0ken" in done.stdout
