"""Says why this machine cannot start the hosts of a test cluster, if it cannot."""

import os
import shutil
import subprocess

TOOLS = ("ip", "iptables", "mount", "nsenter", "ssh", "ssh-keygen", "sshd", "unshare")
PLACES = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def what_hosts_lack():
    """The first reason in words, or an empty text if hosts can start here."""
    if os.geteuid() != 0:
        return "hosts in namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=PLACES) is None]
    if missing:
        return f"hosts in namespaces need {', '.join(missing)}"
    kinds = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork"]
    refused = subprocess.run(
        ["unshare", *kinds, "mount", "-t", "tmpfs", "none", "/tmp"],  # noqa: S108 - in a namespace that ends at once
        capture_output=True,
        text=True,
        check=False,
    )
    return f"this machine refuses namespaces: {refused.stderr.strip()}" if refused.returncode else ""
