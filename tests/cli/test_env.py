"""`--env`: what is wrong with it is said without its value, and the plan has the variable."""

import json

import pytest


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "1X=2": "error[T039]: `--env 1X` does not name an environment variable",
        "=2": "error[T039]: `--env =…` does not name an environment variable",
        "NOT_THERE": "error[T025]: `--env NOT_THERE` takes the value of `NOT_THERE`, which is not defined in this shell",
        "A=env:NOT_THERE": "error[T025]: `--env A` takes the value of `NOT_THERE`, which is not defined in this shell",
        "TTLAUNCH_RANK=5": "error[P009]: `--env TTLAUNCH_RANK` has no effect: ttlaunch itself sets the variables `TTLAUNCH_…`",
    }.items(),
)
def test_a_variable_that_cannot_be_set_is_refused_as_a_mistake_on_the_command_line(ttlaunch, text, said):
    answer = ttlaunch(["plan", "data_parallel", "--env", text])
    assert (2, "", said) == (answer.status, answer.stdout, answer.stderr.partition("\n")[0])


def test_the_value_of_a_variable_with_a_wrong_name_is_not_shown(ttlaunch):
    answer = ttlaunch(["plan", "data_parallel", "--env", "MY TOKEN=canary"])
    assert 2 == answer.status
    assert "canary" not in answer.stderr


def test_a_nearly_known_name_is_a_warning(ttlaunch):
    answer = ttlaunch(["plan", "data_parallel", "--env", "PYTHONPAHT=x"])
    assert 0 == answer.status
    assert "did you mean `PYTHONPATH`?" in answer.stderr


def test_the_plan_has_the_variable_and_hides_a_secret(ttlaunch):
    answer = ttlaunch("plan data_parallel --format json --env OMP_NUM_THREADS=1 --env HF_TOKEN=canary")
    assert 0 == answer.status, answer.stderr
    environment = json.loads(answer.stdout)["environment"]
    assert ("1", "env:TTLAUNCH_SECRET_0") == (environment["OMP_NUM_THREADS"], environment["HF_TOKEN"])
    assert "canary" not in answer.stdout


@pytest.mark.parametrize("name", ["RANK", "GROUP_WORLD_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"])
def test_a_variable_that_differs_between_ranks_cannot_be_set_for_all(ttlaunch, here, name):
    (here / "train.py").write_text("import mpi4py\n")
    answer = ttlaunch(f"run -n 2 --env {name}=0 train.py")
    assert (2, True) == (answer.status, answer.stderr.startswith(f"error[P067]: `{name}` is set for all ranks"))
    assert not (here / "runs").exists()


@pytest.mark.parametrize("engine", ["openmpi", "agents"])
@pytest.mark.parametrize(
    "name", ["PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE", "PMI_RANK"]
)
def test_no_engine_lets_a_place_in_mpi_be_set_for_all_ranks(ttlaunch, here, engine, name):
    setter = {"openmpi": "mpirun", "agents": "an engine with MPI"}[engine]
    for target in ("train.py", "-- hostname"):
        (here / "train.py").write_text("")
        answer = ttlaunch(f"plan -n 2 --engine {engine} --env {name}=7 {target}")
        assert 2 == answer.status
        message = f"error[P067]: `{name}` is set for all ranks, but {setter} sets it for each\n"
        assert answer.stderr.startswith(message), answer.stderr


@pytest.mark.parametrize("name", ["OMPI_MCA_btl", "PMIX_MCA_gds", "PRTE_MCA_plm"])
def test_settings_of_an_engine_may_be_the_same_for_all_ranks(ttlaunch, here, name):
    assert 0 == ttlaunch(f"plan -n 2 --env {name}=x -- hostname").status


def test_files_of_a_cluster_that_set_the_rank_of_all_are_a_mistake_in_the_description(ttlaunch, here):
    (here / "configurations/lab").mkdir(parents=True)
    (here / "configurations/lab/hosts.txt").write_text("localhost slots=2\n")
    (here / "configurations/lab/cluster.yaml").write_text("environment: {LOCAL_RANK: '0'}\n")
    (here / "train.py").write_text("")
    answer = ttlaunch("plan --on lab -n 2 train.py")
    assert (3, True) == (answer.status, "given in the files of the cluster" in answer.stderr), answer.stderr


def test_other_programs_may_have_a_variable_of_that_name(ttlaunch):
    assert 0 == ttlaunch("plan -n 2 --env RANK=0 --env MASTER_PORT=1 -- hostname").status
