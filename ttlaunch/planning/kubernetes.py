"""Write a run as objects of Kubernetes: a JobSet, or an MPIJob of the MPI Operator. Nothing here talks to a server.

Both have the same pods. A worker runs sshd; the launcher runs `ttlaunch run` with the workers as its hostfile. The only key is that of the
job, a Secret: workers accept it, and they also show it as their host key, so the launcher knows every host before it connects.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TARGETS = ("jobset", "mpijob")
KEY_FOLDER = "/root/.ssh"
HOSTFILE_FOLDER = "/etc/mpi"
_KEY = f"{KEY_FOLDER}/id_rsa"
# `ttlaunch run` looks for keys under their usual names, so the key has one of these, whatever its kind is.
_KEY_ITEMS = {"ssh-privatekey": "id_rsa", "ssh-publickey": "id_rsa.pub"}
_WORKER = f"mkdir -p /run/sshd && exec /usr/sbin/sshd -D -e -h {_KEY} -o StrictModes=no -o PasswordAuthentication=no"
_LAUNCHER = f"""printf '* %s\\n' "$(cat {_KEY}.pub)" >/etc/ssh/ssh_known_hosts && exec "$@\""""
_SSH_PORT = 22
_GRACE_S = 120
_OWNER_ONLY = 0o600
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?\Z")
_LONGEST_NAME = 40
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_/.-]*\Z")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


@dataclass(frozen=True)
class PodRun:
    """A run as pods.

    Attributes:
        name: The name of the job, of which its Secrets and host names are made.
        image: The container image of all pods.
        hosts: The number of workers.
        slots: The number of ranks that may run on each worker.
        command: The command line of the launcher, without secrets.
        resources: The limits of each worker, such as `nvidia.com/gpu`.
        variables: Variables of the launcher with values that are not secret.
        secrets: Variables of the launcher whose values are in the Secret `NAME-env`.
    """

    name: str
    image: str
    hosts: int
    slots: int
    command: Sequence[str]
    resources: Mapping[str, str]
    variables: Mapping[str, str]
    secrets: Sequence[str]

    @property
    def host_names(self) -> list[str]:
        """Return the names that a JobSet gives its workers, without the namespace."""
        return [f"{self.name}-worker-0-{index}.{self.name}" for index in range(self.hosts)]

    @property
    def hostfile(self) -> str:
        return "".join(f"{host} slots={self.slots}\n" for host in self.host_names)


def name_problem(name: str) -> str | None:
    """Return why a job cannot have this name, or None if it can: pods' names are made of it, and these are DNS labels."""
    if _LABEL.match(name) and len(name) <= _LONGEST_NAME:
        return None
    return (
        f"expected up to {_LONGEST_NAME} lower-case letters, digits and `-`, with a letter first and no `-` at the end"
    )


def default_name(target: str) -> str:
    """Return a name for the job of a recipe or script."""
    words = re.sub(r"[^a-z0-9]+", "-", target.lower().removesuffix(".py")).strip("-")
    return re.sub(r"\A(?=[^a-z]|\Z)", "run-", words)[:_LONGEST_NAME].strip("-")


def plan_jobset(run: PodRun) -> list[dict[str, Any]]:
    """Return a ConfigMap with the hostfile, and the JobSet: its launcher is made when all workers are ready, and ends it."""
    volumes = [
        {"name": "hosts", "configMap": {"name": f"{run.name}-hosts"}},
        {
            "name": "ssh-auth",
            "secret": {"secretName": f"{run.name}-ssh", "defaultMode": _OWNER_ONLY, "items": _key_items()},
        },
    ]
    mounts = [{"name": "ssh-auth", "mountPath": KEY_FOLDER}]
    hostfile = {"name": "hosts", "mountPath": HOSTFILE_FOLDER}
    worker, launcher = _worker(run), _launcher(run)
    worker["containers"][0]["volumeMounts"] += mounts
    worker["volumes"] += volumes[1:]
    launcher["containers"][0]["volumeMounts"] = [hostfile, *mounts]
    launcher["volumes"] = volumes
    jobs = [
        {"name": "worker", "replicas": 1, "template": _job(worker, pods=run.hosts)},
        {
            "name": "launcher",
            "replicas": 1,
            "dependsOn": [{"name": "worker", "status": "Ready"}],
            "template": _job(launcher, pods=1),
        },
    ]
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": run.name},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": jobs,
    }
    hosts = {"name": f"{run.name}-hosts"}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": hosts, "data": {"hostfile": run.hostfile}},
        {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": run.name}, "spec": spec},
    ]


def plan_mpijob(run: PodRun) -> list[dict[str, Any]]:
    """Return the MPIJob; the MPI Operator makes its Secret with the key, and mounts this and the hostfile."""
    replicas = {
        "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": {"spec": _launcher(run)}},
        "Worker": {"replicas": run.hosts, "restartPolicy": "Never", "template": {"spec": _worker(run)}},
    }
    spec = {
        "slotsPerWorker": run.slots,
        "sshAuthMountPath": KEY_FOLDER,
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
        "mpiReplicaSpecs": replicas,
    }
    return [{"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": {"name": run.name}, "spec": spec}]


def _worker(run: PodRun) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "worker",
        "image": run.image,
        "command": ["/bin/sh", "-c", _escaped(_WORKER)],
        "readinessProbe": {"tcpSocket": {"port": _SSH_PORT}, "periodSeconds": 2},
        # Containers have 64 MiB of shared memory, and MPI libraries and data loaders use more.
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],  # noqa: S108 - of the container
    }
    if run.resources:
        container["resources"] = {"limits": dict(run.resources)}
    return {"containers": [container], "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]}


def _launcher(run: PodRun) -> dict[str, Any]:
    plain = [{"name": name, "value": _escaped(value)} for name, value in run.variables.items()]
    secret = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": f"{run.name}-env", "key": name}}} for name in run.secrets
    ]
    container: dict[str, Any] = {
        "name": "launcher",
        "image": run.image,
        "command": ["/bin/sh", "-c", _escaped(_LAUNCHER), "sh"],
        "args": [_escaped(word) for word in run.command],
    }
    if plain or secret:
        container["env"] = [*plain, *secret]
    # Ranks may take so long after SIGTERM to finish their step and save a checkpoint.
    return {"terminationGracePeriodSeconds": _GRACE_S, "containers": [container]}


def _job(pod: dict[str, Any], *, pods: int) -> dict[str, Any]:
    spec = {"restartPolicy": "Never", **pod}
    counts = {"parallelism": pods, "completions": pods, "completionMode": "Indexed", "backoffLimit": 0}
    return {"spec": {**counts, "template": {"spec": spec}}}


def _key_items() -> list[dict[str, str]]:
    items = [{"key": key, "path": path} for key, path in _KEY_ITEMS.items()]
    return [*items, {"key": "ssh-publickey", "path": "authorized_keys"}]


def _escaped(word: str) -> str:
    """Return a word of a container's command or a value of a variable, in which Kubernetes would expand `$(NAME)`."""
    return word.replace("$", "$$")


def render_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """Write documents as YAML in which no loader takes a text for anything else: quoted unless it is a plain word."""
    import yaml  # noqa: PLC0415 - only this function needs it

    class Dumper(yaml.SafeDumper):
        pass

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        is_plain = _PLAIN.match(text) and text.lower() not in _WORDS
        style = "|" if text.endswith("\n") and text.isascii() else None if is_plain else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent)
    apart = json.loads(json.dumps(documents))  # else YAML writes what two objects share as an alias
    return yaml.dump_all(apart, Dumper=Dumper, sort_keys=False, width=10_000, explicit_start=True)
