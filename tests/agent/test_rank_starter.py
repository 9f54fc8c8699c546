"""Starting the ranks of a host: what its interpreter imports before it takes the order to start."""

import subprocess
import sys

from ttlaunch.agent import START_RANKS


def test_what_starts_ranks_is_a_module_whose_bytecode_is_kept_and_imports_no_sockets(tmp_path):
    command = [sys.executable, "-I", "-S", "-X", "importtime", START_RANKS, str(tmp_path / "plan.json")]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)

    imported = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines() if "|" in line}
    assert "ttlaunch.agent.rank_starter" in imported
    assert set() == imported & {"socket", "random", "typing", "dataclasses", "shutil"}
