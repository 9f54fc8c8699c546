"""Commands of ttlaunch on the launching machine of a test cluster; no program of its own."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.hosts import Cluster


def start_in_cluster(words: Sequence[str], cluster: Cluster, folder: Path) -> "subprocess.Popen[str]":
    """Start `ttlaunch WORDS` in a folder, in a session of its own, so that Ctrl-C for the benchmark does not reach it."""
    started: subprocess.Popen[str] = cluster.popen(
        "launcher",
        [sys.executable, "-m", "ttlaunch", *words],
        cwd=folder,
        env=cluster.environment("launcher"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    return started
