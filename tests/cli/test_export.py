"""`ttlaunch export`: files for Kubernetes that its API accepts, that start the same run, and that hold no secret."""

import json

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.planning.crds import BY_KIND
from ttlaunch.planning.kubernetes import PodRun, default_name, name_problem, plan_jobset, plan_mpijob, render_yaml

IMAGE = "--image registry.example/train:1"
TARGETS = ("jobset", "mpijob")
SECRET = "s3cr3t-of-the-user"  # noqa: S105 - not one


@pytest.fixture
def exported(ttlaunch):
    """`exported(line)`: the text of the file, and its objects by kind, each of which the API accepts."""

    def invoke(line):
        answer = ttlaunch(f"export {line}")
        assert 0 == answer.status, answer.stderr
        objects = {one["kind"]: one for one in yaml.safe_load_all(answer.stdout)}
        for kind, one in objects.items():
            jsonschema.Draft202012Validator(BY_KIND[kind]).validate(one)
        return answer.stdout, objects

    return invoke


def pods(objects):
    """The launcher's and the worker's pod, whichever object holds them."""
    if "MPIJob" in objects:
        replicas = objects["MPIJob"]["spec"]["mpiReplicaSpecs"]
        return tuple(replicas[name]["template"]["spec"] for name in ("Launcher", "Worker"))
    jobs = {
        one["name"]: one["template"]["spec"]["template"]["spec"] for one in objects["JobSet"]["spec"]["replicatedJobs"]
    }
    return jobs["launcher"], jobs["worker"]


def words_of(objects):
    """The command line that the launcher runs after it knows the hosts' keys."""
    return [word.replace("$$", "$") for word in pods(objects)[0]["containers"][0]["args"]]


@pytest.mark.parametrize("to", TARGETS)
def test_a_recipe_with_devices_and_variables_is_exported(exported, golden, to):
    line = f"data_parallel --to {to} {IMAGE} --hosts 2 --resource nvidia.com/gpu=1 --env HF_TOKEN --env LR=1e-3"
    golden(f"export/{to}.yaml", exported(line)[0])


@pytest.mark.parametrize("to", TARGETS)
def test_the_launcher_runs_what_was_typed_with_the_hostfile_of_the_pods(exported, here, to):
    (here / "train.py").write_text("")
    _, objects = exported(f"train.py --to {to} {IMAGE} --hosts 2 --slots 4 --ranks 8 -- --lr 1e-3 --name 'a $(b) no'")
    expected = ["ttlaunch", "run", "train.py", "--hostfile", "/etc/mpi/hostfile", "--ranks", "8"]
    assert [*expected, "--", "--lr", "1e-3", "--name", "a $(b) no"] == words_of(objects)


def test_any_program_is_exported_after_two_dashes(exported):
    _, objects = exported(f"--to mpijob {IMAGE} --hosts 2 -- my_program --fast")
    assert ["--hostfile", "/etc/mpi/hostfile", "--", "my_program", "--fast"] == words_of(objects)[2:]


def test_options_of_a_recipe_reach_the_launcher(exported, here):
    (here / "mine.yaml").write_text("training_config: {steps: 3}\n")
    line = (
        f"data_parallel --to mpijob {IMAGE} --hosts 3 -c mine.yaml --set training_config.batch_size=8 --ranks 3 --naive"
    )
    words = words_of(exported(line)[1])
    assert "-c mine.yaml --set training_config.batch_size=8 --ranks 3 --naive" == " ".join(words[5:])


def test_a_jobset_has_the_hostfile_of_its_own_pods_and_ends_with_its_launcher(exported):
    _, objects = exported(f"data_parallel --to jobset {IMAGE} --hosts 2 --name lab")
    hosts = "lab-worker-0-0.lab slots=1\nlab-worker-0-1.lab slots=1\n"
    spec = objects["JobSet"]["spec"]
    assert hosts == objects["ConfigMap"]["data"]["hostfile"]
    assert {"enableDNSHostnames": True, "subdomain": "lab"} == spec["network"]
    assert ["launcher"] == spec["successPolicy"]["targetReplicatedJobs"]
    assert [{"name": "worker", "status": "Ready"}] == spec["replicatedJobs"][1]["dependsOn"]


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize(
    "options",
    [f"--env HF_TOKEN={SECRET}", "--env HF_TOKEN", "--env HF_TOKEN=env:OTHER", f"--env HF_TOKEN=https://u:{SECRET}@h/"],
)
def test_no_value_that_looks_like_a_secret_is_in_the_file(exported, monkeypatch, to, options):
    for name in ("HF_TOKEN", "OTHER"):
        monkeypatch.setenv(name, SECRET)
    text, objects = exported(f"data_parallel --to {to} {IMAGE} --hosts 2 --name lab {options}")
    variable = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "lab-env", "key": "HF_TOKEN"}}}
    assert [variable] == pods(objects)[0]["containers"][0]["env"]
    assert SECRET not in text
    assert "# kubectl create secret generic lab-env --from-env-file=FILE\n" in text


def test_a_variable_that_the_training_file_names_is_read_from_the_secret(exported, here, monkeypatch):
    (here / "book.txt").write_text("words and words and more words, " * 2000)
    monkeypatch.setenv("DATA_PATH", str(here / "book.txt"))
    line = f"data_parallel --to mpijob {IMAGE} --hosts 2 --set training_config.data_path=env:DATA_PATH"
    text, objects = exported(line)
    assert ["DATA_PATH"] == [one["name"] for one in pods(objects)[0]["containers"][0]["env"]]
    assert str(here) not in text


@pytest.mark.parametrize(
    "words", [f"-- --api-key={SECRET}", f"-- --password {SECRET}", f"-- --url https://me:{SECRET}@host/"]
)
@pytest.mark.parametrize("form", ["full", "json"])
def test_an_argument_that_looks_like_a_secret_is_refused_and_not_shown(ttlaunch, here, words, form):
    (here / "train.py").write_text("")
    answer = ttlaunch(f"export train.py --to mpijob {IMAGE} --hosts 2 --format {form} {words}")
    assert (2, False) == (answer.status, SECRET in answer.stdout + answer.stderr)
    assert "P056" in answer.stdout + answer.stderr


def test_the_example_of_p056_shows_it(ttlaunch, here):
    (here / "train.py").write_text("")
    line = "export train.py --to mpijob --image registry.example/train:1 --hosts 2 -- --api-key=k3y"
    answer = ttlaunch(line)
    assert (2, True) == (answer.status, answer.stderr.startswith("error[P056]: "))
    assert f"ttlaunch {line}\n" in ttlaunch("explain P056").stdout


def test_ranks_that_do_not_fit_the_pods_are_refused_before_a_file_is_written(ttlaunch, here):
    answer = ttlaunch(f"export data_parallel --to mpijob {IMAGE} --hosts 1 --ranks 2 --out job.yaml")
    assert (3, True, []) == (answer.status, "1 slot" in answer.stderr, list(here.iterdir()))
    (here / "train.py").write_text("print()\n")
    answer = ttlaunch(f"export train.py --to jobset {IMAGE} --hosts 2 --slots 2 --ranks 5 --out job.yaml")
    expected = "error[P002]: `--ranks 5` was given but the hosts offer 4 slots"
    assert (3, True) == (answer.status, answer.stderr.startswith(expected))
    assert ["train.py"] == [path.name for path in here.iterdir()]


@pytest.mark.parametrize(
    "options",
    [
        "data_parallel --to pod",
        "data_parallel --to jobset --name Lab",
        "data_parallel --to jobset --name lab-",
        f"data_parallel --to jobset --name {'a' * 41}",
        "data_parallel --to jobset --resource gpu",
        "data_parallel --to jobset --resource gpu=many",
        "data_parallel --to jobset --env 1A=x",
        "data_parallel --to jobset -c -",
        "nope.py --to jobset",
    ],
)
def test_a_mistake_on_the_command_line_ends_with_status_2(ttlaunch, here, options):
    assert 2 == ttlaunch(f"export {IMAGE} --hosts 2 {options} --out job.yaml").status
    assert [] == list(here.iterdir())


def test_the_file_is_written_once(ttlaunch, here):
    line = f"export data_parallel --to mpijob {IMAGE} --hosts 2 --out job.yaml"
    assert [0, 2, 0] == [ttlaunch(text).status for text in (line, line, f"{line} --force")]
    assert (here / "job.yaml").read_text().startswith("# No server has run this file.")


def test_json_has_the_objects_that_the_file_has(ttlaunch, exported):
    line = f"data_parallel --to jobset {IMAGE} --hosts 2 --env HF_TOKEN"
    found = json.loads(ttlaunch(f"export {line} --format json").stdout)
    assert list(exported(line)[1].values()) == found["objects"]
    assert ["HF_TOKEN"] == found["secrets"]


@pytest.mark.parametrize(
    ("target", "name"),
    [("data_parallel", "data-parallel"), ("Train_v2.py", "train-v2"), ("3d.py", "run-3d"), ("ü", "run")],
)
def test_a_job_is_named_after_what_it_runs(target, name):
    assert name == default_name(target)


@settings(max_examples=examples(50))
@given(st.text(max_size=60))
def test_every_target_gives_a_name_that_pods_can_have(target):
    assert None is name_problem(default_name(target))


@settings(max_examples=examples(25))  # each writes and reads two files of YAML
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12), max_size=4))
def test_every_word_of_a_command_is_the_same_text_after_yaml(words):
    run = PodRun("lab", "image", 1, 1, words, {}, {"A": "".join(words)}, ())
    for documents in (plan_jobset(run), plan_mpijob(run)):
        read = list(yaml.safe_load_all(render_yaml(documents)))
        assert documents == read
        assert words == words_of({one["kind"]: one for one in read}) if words else True


@pytest.mark.parametrize(
    "word", ["1e-3", "yes", "on", "No", "1:30", "0x1F", "010", "~", "null", "-", "", "2026-01-01", "y"]
)
def test_a_word_that_some_loader_takes_for_another_type_is_quoted(word):
    run = PodRun("lab", "image", 1, 1, [word], {}, {}, ())
    assert f'- "{word}"\n' in render_yaml(plan_mpijob(run))
