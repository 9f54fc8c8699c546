"""A command line written for the vendor's launcher works: bindings, words for mpirun, any program."""

import json
from pathlib import Path

import pytest

CONFIGURATION = Path(__file__).parents[2] / "configurations/2loudboxes"
PRINTS = 'echo "$TT_MESH_ID $TT_RUN_RANK $FREE $OMPI_MCA_btl"'


@pytest.fixture(autouse=True)
def files(here, monkeypatch):
    """The bindings of two loudboxes with their descriptor."""
    monkeypatch.setenv("HOME", "/home/ann")
    for name in ("rank_bindings.yaml", "mgd.yaml"):
        (here / name).write_text((CONFIGURATION / name).read_text())


def planned(ttlaunch, *words):
    answer = ttlaunch(["plan", *words, "--format", "json", "--", "hostname"])
    assert ("", 0) == (answer.stderr, answer.status)
    return json.loads(answer.stdout)


def places(plan):
    return [(row["host"], row["slot"], row["mesh_id"]) for row in plan["ranks"]]


@pytest.mark.parametrize("option", ["--rank-binding", "--rank-bindings", "--rank-bindings-mapping"])
def test_bindings_alone_run_on_this_machine(ttlaunch, option):
    plan = planned(ttlaunch, option, "rank_bindings.yaml")
    assert [("localhost", 0, 1), ("localhost", 1, 0)] == places(plan)
    assert "localhost slots=2\n" == plan["engine"]["files"]["hosts.txt"]


def test_hosts_among_the_words_for_mpirun_are_those_of_the_bindings(ttlaunch):
    plan = planned(ttlaunch, "--rank-binding", "rank_bindings.yaml", "--mpi-args", "--host b,a:2")
    assert [("b", 0, 1), ("a", 0, 0)] == places(plan)


def test_a_hostfile_among_the_words_for_mpirun_is_read(ttlaunch, here):
    (here / "h").write_text("c slots=2\n")
    plan = planned(ttlaunch, "--rank-bindings", "rank_bindings.yaml", "--mpi-args", "--hostfile h")
    assert [("c", 0, 1), ("c", 1, 0)] == places(plan)


def test_other_words_come_after_our_settings_and_instead_of_those_they_repeat(ttlaunch):
    argv = planned(ttlaunch, "--mpi-args", "--mca btl self,tcp -x 'FREE=a b'")["engine"]["argv"]
    assert ["--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "-x", "FREE=a b"] == argv[-13:-5]


@pytest.mark.mpi
def test_a_program_of_the_vendors_launcher_runs(ttlaunch):
    words = ["--rank-binding", "rank_bindings.yaml", "--mpi-args", "--mca btl self,tcp --tag-output -x FREE=yes"]
    answer = ttlaunch(["run", *words, "--", "sh", "-c", PRINTS])
    assert 0 == answer.status
    lines = sorted(line for line in answer.stdout.splitlines() if line.startswith("rank "))
    assert ["rank 0 rank | 1 0 yes self,tcp", "rank 1 rank | 0 1 yes self,tcp"] == lines


@pytest.mark.parametrize(
    "option",
    ["--hostfile hosts.txt", "--rank-bindings rank_bindings.yaml", "--mpi-args='--host a'"],
    ids=["hostfile", "bindings", "words"],
)
def test_two_descriptions_of_the_cluster_are_refused(refused, option):
    refused(f"plan fabric_minimal --on 5loudboxes {option}", files={"hosts.txt": "a slots=2\n"}, status=2)


def test_two_ways_to_name_hosts_are_refused(refused):
    line = "plan fabric_minimal --hostfile hosts.txt --mpi-args='-H a'"
    refused(line, files={"hosts.txt": "a slots=2\n"}, status=2)


def test_words_that_decide_what_the_plan_decides_are_refused(refused):
    refused("run --mpi-args='-np 4 --map-by node --host a' -- hostname", status=2)


def test_bad_hosts_among_the_words_are_refused(refused):
    refused("run --mpi-args='--host a,b:0,c;d' -- hostname", status=3)


def test_bindings_of_more_ranks_than_hosts_among_the_words_are_refused(refused):
    refused("run --rank-binding rank_bindings.yaml --mpi-args='--host a' -- hostname", status=3)


def test_bindings_that_are_not_there_are_refused(refused):
    refused("run --rank-binding bindings.yaml -- hostname", status=2)


@pytest.mark.parametrize(
    "words",
    [
        "--rankfile ranks",
        "-rf ranks",
        "--map-by rankfile:file=ranks",
        "--map-by rankfile:oversubscribe:file=ranks:nolocal",
        "--mca rmaps_rankfile_path ranks",
    ],
)
def test_a_rankfile_is_refused_with_the_hostfile_that_places_the_ranks_alike(ttlaunch, words):
    Path("ranks").write_text("rank 2=b slot=0\nrank 0=a slot=0\nrank 1=a slot=1\n")
    answer = ttlaunch(["plan", "--mpi-args", words, "--", "hostname"])
    assert (2, 1) == (answer.status, answer.stderr.count("error["))
    hint = "hint: the same as a hostfile, one line each: `a slots=2`, `b slots=1`; `--hostfile FILE` names it"
    assert hint in answer.stderr


def test_a_rankfile_whose_order_no_hostfile_gives_says_which_ranks_to_renumber(ttlaunch):
    Path("ranks").write_text("rank 0=a slot=0\nrank 1=b slot=0\nrank 2=a slot=1\n")
    answer = ttlaunch(["plan", "--mpi-args", "--rankfile ranks", "--", "hostname"])
    assert (
        "`a slots=2`, `b slots=1`; there the ranks of one host follow each other, so renumber those of `a`"
        in answer.stderr
    )


def test_a_file_of_a_cluster_in_place_of_the_training_file_is_one_mistake(ttlaunch):
    answer = ttlaunch(["plan", "data_parallel", "-c", "mgd.yaml"])
    assert (3, 1) == (answer.status, answer.stderr.count("error["))
    assert answer.stderr.startswith("error[T062]: mgd.yaml is a mesh graph descriptor; a training file was expected")
