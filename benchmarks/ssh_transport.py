"""Our SSH transport beside ssh itself: connecting to many hosts, running a command, and 100 MB each way.

    python benchmarks/ssh_transport.py [--hosts 32] [--rounds 5] [--megabytes 100]

Needs root: the hosts are namespaces with their own sshd. Rounds take turns, after one of each that does not count.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

from tests.cluster.hosts import Cluster

_OURS = """
import json, sys, time
from ttlaunch.hosts.transport.fleet import on_each
from ttlaunch.hosts.transport.address import HostAddress
from ttlaunch.hosts.transport.key_ring import KeyRing
from ttlaunch.hosts.transport.ssh import SshTransport
from ttlaunch.hosts.transport.transport import run

def clock(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began

def connect(names):
    keys = KeyRing()
    hosts = [SshTransport(HostAddress(name), keys=keys) for name in names]
    for host, answer in on_each(hosts, lambda host: host.connect(timeout_s=20), timeout_s=21):
        if answer is not None:
            raise answer
    return hosts

names, size = json.loads(sys.argv[1]), int(sys.argv[2])
took = {}
kept = []
took["connect to 1 host"] = clock(lambda: kept.extend(connect(names[:1])))
took["connect to 4 hosts"] = clock(lambda: kept.extend(connect(names[:4])))
took[f"connect to {len(names)} hosts"] = clock(lambda: kept.extend(connect(names)))
one = kept[0]
took["a command"] = clock(lambda: run(one, "true", timeout_s=20))
took["to the host"] = clock(lambda: run(one, "cat >/dev/null", stdin=bytes(size), timeout_s=60))
took["from the host"] = clock(lambda: run(one, f"head -c {size} /dev/zero", timeout_s=60))
print(json.dumps(took))
"""


def main() -> None:
    """Print medians in seconds and, where ssh does the same, the ratio to it."""
    parser = argparse.ArgumentParser(description="Measure the SSH transport.")
    parser.add_argument("--hosts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=100)
    options = parser.parse_args()
    size = options.megabytes * 1_000_000
    with Cluster(hosts=options.hosts, share=()) as cluster:
        rounds = [(_ours(cluster, size), _theirs(cluster, size)) for _ in range(options.rounds + 1)][1:]
    for name in rounds[0][0]:
        ours = statistics.median(mine[name] for mine, _ in rounds)
        line = f"{name:22} {ours:6.3f} s"
        if name in rounds[0][1]:
            theirs = statistics.median(peer[name] for _, peer in rounds)
            line += f"   ssh {theirs:6.3f} s   ratio {ours / theirs:.2f}"
        print(line)


def _ours(cluster: Cluster, size: int) -> dict[str, float]:
    words = [sys.executable, "-c", _OURS, json.dumps(cluster.hosts), str(size)]
    ended = cluster.run("launcher", words, check=True, timeout=120)
    return json.loads(ended.stdout)


def _theirs(cluster: Cluster, size: int) -> dict[str, float]:
    """What ssh takes for the same; it connects anew each time, so that is taken off where we do not."""
    zeros = f"head -c {size} /dev/zero"
    alone = _clock(cluster, "ssh node0 true")
    return {
        "connect to 1 host": alone,
        "connect to 4 hosts": _clock(cluster, _at_once(cluster.hosts[:4])),
        f"connect to {len(cluster.hosts)} hosts": _clock(cluster, _at_once(cluster.hosts)),
        "to the host": _clock(cluster, f"{zeros} | ssh node0 'cat >/dev/null'") - alone,
        "from the host": _clock(cluster, f"ssh node0 '{zeros}' >/dev/null") - alone,
    }


def _at_once(hosts: list[str]) -> str:
    return "; ".join([*(f"ssh {host} true &" for host in hosts), "wait"]).replace("&;", "&")


def _clock(cluster: Cluster, line: str) -> float:
    began = time.perf_counter()
    cluster.run("launcher", ["sh", "-c", line], check=True, timeout=120, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
