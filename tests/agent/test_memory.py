"""What the kernel says about memory, from files as different kernels and containers show them."""

import pytest

from ttlaunch.agent.memory import memory_limit, oom_kills, settings_for_limit

MACHINE = {"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\n", "proc/vmstat": "nr_free 3\noom_kill 7\n"}
UNIFIED = {
    "proc/self/cgroup": "0::/batch/job\n",
    "sys/fs/cgroup/batch/job/memory.events": "oom 4\noom_kill 2\n",
    "sys/fs/cgroup/batch/job/memory.max": "max\n",
    "sys/fs/cgroup/batch/memory.max": "512000\n",
}
IN_A_CONTAINER = {
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/memory.events": "oom_kill 1\n",
    "sys/fs/cgroup/memory.max": "256000\n",
}
OLD = {
    "proc/self/cgroup": "4:memory:/slice\n0::/\n",
    "sys/fs/cgroup/memory/slice/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
    "sys/fs/cgroup/memory/slice/memory.limit_in_bytes": "300000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
}
HIDDEN = {"proc/self/cgroup": "4:memory:/elsewhere\n", "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 3\n"}


@pytest.mark.parametrize(
    ("files", "kills", "limit"),
    [
        ({}, 7, 1_024_000),
        (UNIFIED, 2, 512_000),
        (IN_A_CONTAINER, 1, 256_000),
        (OLD, 5, 300_000),
        (HIDDEN, 3, 1_024_000),
    ],
    ids=["no groups", "version 2", "container", "version 1", "hidden path"],
)
def test_kills_and_limit_are_those_of_the_own_group(tmp_path, files, kills, limit):
    write(tmp_path, {**MACHINE, **files})
    assert (oom_kills(root=str(tmp_path)), memory_limit(root=str(tmp_path))) == (kills, limit)


@pytest.mark.parametrize(
    ("files", "is_limited"),
    [({}, False), (UNIFIED, True), (IN_A_CONTAINER, True), (OLD, True), (HIDDEN, False)],
    ids=["no groups", "version 2", "container", "version 1", "hidden path"],
)
def test_a_rank_returns_freed_memory_only_where_a_group_limits_it(tmp_path, files, is_limited):
    write(tmp_path, {**MACHINE, **files})
    limit = memory_limit(root=str(tmp_path))
    found = settings_for_limit(ranks=2, root=str(tmp_path))
    assert (str(limit // 2) if is_limited else None) == found.get("TTLAUNCH_MEMORY")
    assert is_limited == ("MALLOC_TRIM_THRESHOLD_" in found)


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_kernel_that_says_nothing_is_believed(tmp_path):
    assert (oom_kills(root=str(tmp_path)), memory_limit(root=str(tmp_path))) == (None, None)
