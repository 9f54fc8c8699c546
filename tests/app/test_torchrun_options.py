"""torchrun's spelling of the number of ranks, and scripts with arguments but without `--`."""

import json
import re

import pytest

import ttlaunch as ttlaunch_api

ONE, TWO = "localhost slots=4\n", "localhost slots=2\nnode1 slots=2\n"


@pytest.fixture
def typed(ttlaunch, here):
    """`typed(line, hosts)`: the answer to a command line for the script `train.py` on a cluster `lab`."""

    def answer(line, hosts=ONE):
        (here / "configurations/lab").mkdir(parents=True)
        (here / "configurations/lab/hosts.txt").write_text(hosts)
        (here / "train.py").write_text("")
        return ttlaunch(line)

    return answer


def planned(answer):
    assert answer.status == 0, answer.stderr
    return json.loads(answer.stdout)


@pytest.mark.parametrize(
    ("options", "hosts", "ranks"),
    [
        ("--nproc-per-node 2", ONE, 2),
        ("--nproc_per_node=3", ONE, 3),
        ("--standalone --nproc-per-node 2", ONE, 2),
        ("--standalone", ONE, 1),
        ("--nnodes 1:1 --nproc-per-node 2", ONE, 2),
        ("--nnodes 2 --nproc-per-node 2", TWO, 4),
        ("--nproc-per-node 2 --ranks 4", TWO, 4),
    ],
)
def test_options_of_torchrun_say_how_many_ranks_there_are(typed, options, hosts, ranks):
    plan = planned(typed(f"plan --on lab {options} --format json train.py", hosts))
    assert ranks == plan["world_size"]
    said = [remark for remark in plan["remarks"] if remark.endswith(f"as `--ranks {ranks}`")]
    assert (1 if "--ranks" not in options else 0) == len(said)


@pytest.mark.parametrize(
    ("options", "hosts", "message"),
    [
        ("--nnodes 2", ONE, "error[P055]: `--nnodes 2` was given but `lab` has 1 host"),
        ("--nproc-per-node 5", ONE, "error[P055]: `--nproc-per-node 5` was given but localhost has 4 slots"),
        ("--nproc-per-node 1", TWO, "error[P055]: `--nproc-per-node 1` was given but localhost has 2 slots"),
        ("--standalone", TWO, "error[P055]: `--standalone` was given but `lab` has other hosts than this machine"),
        (
            "--nproc-per-node 2 -n 3",
            ONE,
            "error[P055]: `--ranks 3` was given but `--nproc-per-node 2` on 1 host is 2",
        ),
        ("--nproc-per-node gpu", ONE, "error[P009]: `--nproc-per-node` is `gpu`; a number of ranks was expected"),
        ("--nproc-per-node 0", ONE, "error[P009]: `--nproc-per-node` is `0`; a number of ranks was expected"),
        ("--nnodes 1:4", ONE, "error[P009]: `--nnodes` is `1:4`; a number of hosts was expected"),
    ],
)
def test_options_that_contradict_the_hosts_are_refused(typed, options, hosts, message):
    answer = typed(f"run --on lab {options} train.py", hosts)
    assert (2, message) == (answer.status, answer.stderr.partition("\n")[0])
    assert ["error"] == re.findall(r"^(\w+)\[", answer.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("train.py --lr 0.1", ["--lr", "0.1"]),
        ("train.py", []),
        ("train.py data -- -x", ["data", "--", "-x"]),
        ("train.py -- data -- -x", ["data", "--", "-x"]),
        ("-n 2 train.py -- data", ["data"]),
        ("-n 2 train.py data --lr=0.1 -x -1", ["data", "--lr=0.1", "-x", "-1"]),
        ("-n2 train.py --lr 0.1 -- --ranks 2", None),
        ("train.py data --ranks 2", ["data"]),
        ("train.py --ranks 2 --lr 0.1", None),
        ("train.py --lr 0.1 --ranks 2", None),
    ],
)
def test_arguments_of_a_script_need_no_dashes_unless_some_could_be_ttlaunchs(typed, line, arguments):
    answer = typed(f"plan --format json {line}")
    if arguments is None:
        assert answer.status == 2
    else:
        assert arguments == planned(answer)["command"]["command"][2:]


def test_a_script_that_is_named_as_a_program_is_answered_with_what_to_type(typed):
    answer = typed("run -n 2 -- train.py --lr 1")
    assert answer.status == 2
    assert "`train.py` is a Python script and no program that can be run by its name" in answer.stderr
    assert "`-- python train.py` runs it with the Python of your shell" in answer.stderr


def test_a_program_gives_the_options_of_torchrun_too(here):
    (here / "train.py").write_text("")
    (here / "hosts.txt").write_text(TWO)
    plan = ttlaunch_api.plan("train.py", hostfile="hosts.txt", nnodes=2, nproc_per_node=2)
    assert 4 == len(plan.ranks)
    with pytest.raises(ttlaunch_api.LaunchError, match="P055"):
        ttlaunch_api.plan("train.py", hostfile="hosts.txt", standalone=True)
    with pytest.raises(ttlaunch_api.LaunchError, match="a whole number of at least 1 was expected"):
        ttlaunch_api.plan("train.py", nproc_per_node=0)


@pytest.mark.mpi
def test_an_experiment_takes_the_options_of_torchrun(ttlaunch, here):
    (here / "work.py").write_text("import time\ntime.sleep(20)\n")
    answer = ttlaunch('chaos --nproc-per-node 2 --plan "kill rank=1 at 1s" work.py')
    assert 0 == answer.status, answer.stdout + answer.stderr


@pytest.mark.parametrize(
    ("options", "hosts", "is_said"),
    [("", TWO, True), ("-n 1", TWO, False), ("-n 4", TWO, False), ("", ONE, False), ("--nproc-per-node 2", TWO, False)],
)
def test_a_script_that_leaves_hosts_idle_because_nobody_said_how_many_ranks_it_has_is_named(
    typed, options, hosts, is_said
):
    answer = typed(f"plan --on lab {options} train.py", hosts)
    message = "warning[P069]: train starts with 1 rank, although `lab` has 4 slots"
    assert (0, is_said) == (answer.status, message in answer.stderr), answer.stderr


@pytest.mark.parametrize(
    ("options", "hosts", "is_said"),
    [("-n 2", ONE, True), ("-n 1", ONE, False), ("-n 4", TWO, True), ("-n 2 --env OMP_NUM_THREADS=4", ONE, False)],
)
def test_a_plan_says_how_many_threads_ranks_get_that_share_a_host(typed, monkeypatch, options, hosts, is_said):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert is_said is (
        "ranks that share a host get OMP_NUM_THREADS=1" in typed(f"plan --on lab {options} train.py", hosts).stdout
    )
