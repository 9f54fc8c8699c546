"""How long `ttlaunch doctor` takes on a cluster of this machine: `python benchmarks/doctor.py [--hosts 32] [--rounds 5]`.

The hosts are namespaces with their own sshd (tests/cluster), so all of them, their probes and the pairs share this
machine's processors: the whole of `doctor` for 32 hosts and 992 ways between them is to take less than 20 seconds. A
second figure has one host that accepts connections and never speaks: it may cost its 5 seconds and no more. Needs root.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cluster.command import CommandLine
from tests.cluster.hosts import Cluster

LONGEST_S = 20.0


def main() -> int:
    """Print the medians; status 1 if one is too long."""
    parser = argparse.ArgumentParser(description="Measure ttlaunch doctor on many hosts.")
    parser.add_argument("--hosts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with Cluster(hosts=options.hosts) as cluster, tempfile.TemporaryDirectory() as folder:
        _introduce(cluster)
        Path(folder, "hosts.txt").write_text(cluster.hostfile(), encoding="utf-8")
        ttlaunch = CommandLine(cluster, cwd=folder)
        healthy = [_seconds(ttlaunch, silent=0) for _ in range(options.rounds)]
        cluster.silent_port(cluster.hosts[-1])
        one_silent = [_seconds(ttlaunch, silent=1) for _ in range(options.rounds)]
    print(f"{options.hosts} hosts, {os.cpu_count()} processors for all of them; seconds")
    print(f"{'':18} {'median':>7} {'least':>7} {'most':>7}")
    for name, seconds in (("all healthy", healthy), ("one never speaks", one_silent)):
        print(f"{name:18} {statistics.median(seconds):7.2f} {min(seconds):7.2f} {max(seconds):7.2f}")
    return int(max(statistics.median(healthy), statistics.median(one_silent)) >= LONGEST_S)


def _introduce(cluster: Cluster) -> None:
    """Tell every host the hardware addresses of the others.

    The kernel keeps 1,024 learned ones for all network namespaces together, which is less than 33 times 32.
    """
    machines = ["launcher", *cluster.hosts]
    link = {
        name: json.loads(cluster.run(name, ["ip", "-json", "link", "show", "eth0"], check=True).stdout)[0]["address"]
        for name in machines
    }
    for name in machines:
        lines = "".join(
            f"neigh replace {cluster.ip(other)} lladdr {link[other]} dev eth0 nud permanent\n"
            for other in machines
            if other != name
        )
        cluster.run(name, ["ip", "-batch", "-"], input=lines, check=True)


def _seconds(ttlaunch: CommandLine, *, silent: int) -> float:
    began = time.perf_counter()
    answer = ttlaunch("doctor --hostfile hosts.txt --format json", timeout_s=120)
    took = time.perf_counter() - began
    said = json.loads(answer.stdout)
    ready = len(said["hosts"]) - silent
    assert silent == sum(host["error"] is not None for host in said["hosts"]), said["diagnostics"]
    assert ready * (ready - 1) == sum(pair["problem"] is None for pair in said["pairs"]), said["diagnostics"]
    return took


if __name__ == "__main__":
    sys.exit(main())
