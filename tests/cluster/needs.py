"""Says why this machine cannot start the hosts of a test cluster, if it cannot."""

import os
import shutil
import subprocess

TOOLS = ("ip", "iptables", "mount", "nsenter", "ssh", "ssh-keygen", "sshd", "unshare")
PLACES = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"

TRIAL = "mount -t tmpfs none /tmp && ip link add name br0 type bridge && ip link add name one type veth peer name two"
"""What every host needs the kernel for, tried in namespaces that end at once."""


def find_tool(name):
    """The path of a program, also one that only root has in PATH; None if there is none."""
    return shutil.which(name, path=PLACES)


def missing_tools(*names):
    return ", ".join(name for name in names if find_tool(name) is None)


def what_hosts_lack():
    """The first reason in words, or an empty text if hosts can start here."""
    if os.geteuid() != 0:
        return "hosts in namespaces need root"
    if missing := missing_tools(*TOOLS):
        return f"hosts in namespaces need {missing}"
    kinds = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork"]
    refused = subprocess.run(
        ["unshare", *kinds, "sh", "-c", TRIAL],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"this machine refuses namespaces: {refused.stderr.strip()}" if refused.returncode else ""
