"""paramiko is imported without invoke and importlib.metadata, which are still found when they are needed."""

import subprocess
import sys

import pytest

_ASK = """
import sys
import {module}
print(*[name for name in sys.modules if name.startswith("invoke.")], sep=" ")
import paramiko
print(paramiko.config.invoke.run("echo found", hide=True).stdout)
"""


@pytest.mark.parametrize(
    "module", ["ssh", "ssh_config", "ssh_connection", "login", "known_hosts", "dial", "ssh_process"]
)
def test_a_module_of_the_transport_imports_no_part_of_invoke_and_paramiko_can_use_it_later(module):
    """Importing it took a third of the time that a run waits before it can connect."""
    ask = _ASK.format(module=f"ttlaunch.hosts.transport.{module}")
    said = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    assert ["", "found"] == said.split("\n")[:2]


def test_paramiko_knows_its_version_without_importlib_metadata_which_is_there_afterwards():
    code = (
        "import sys, importlib\n"
        "from ttlaunch.hosts.transport import ssh\n"
        "print('importlib.metadata' in sys.modules, hasattr(importlib, 'metadata'))\n"
        "import importlib.metadata, paramiko\n"
        "print(paramiko.__version__ == importlib.metadata.version('paramiko'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False False", "True"]
