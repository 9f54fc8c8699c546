"""The plan as a host reads it: its own paths, the same decisions, the same hash."""

import dataclasses

from ttlaunch.planning.on_host import HostPlaces, plan_on_host

PLACES = HostPlaces(
    python="/home/bob/.ttlaunch/env/bin/python",
    package="/home/bob/.ttlaunch/releases/abc/package",
    copies={"/home/ann/project": "/home/bob/.ttlaunch/releases/abc/project"},
    data={"123": "/home/bob/.ttlaunch/data/123", "456": "/home/bob/.ttlaunch/data/456"},
)
SHELL = {
    "HOME": "/home/ann",
    "USER": "ann",
    "PATH": "/home/ann/project/bin:/usr/bin",
    "PYTHONPATH": "/home/ann/project/src:/opt/other",
    "TT_CONFIG": "/home/ann/project/tt.yaml",
    "TT_NEIGHBOUR": "/home/ann/project2/tt.yaml",
}


def on_host(plan, target="hierarchical_parallel", *, described=(), **request):
    made = plan(target, surroundings={"shell": SHELL}, **request)
    places = dataclasses.replace(PLACES, data={made.program.data["sha256"]: "/home/bob/.ttlaunch/data/text"})
    return made, plan_on_host(made, places, python="/opt/venv/bin/python", described=described)


def test_paths_into_what_was_copied_are_moved_and_others_stay(plan):
    _, content = on_host(plan)
    environment = content["environment"]
    assert content["working_folder"] == "/home/bob/.ttlaunch/releases/abc/project"
    assert environment["TT_CONFIG"] == "/home/bob/.ttlaunch/releases/abc/project/tt.yaml"
    assert environment["TT_NEIGHBOUR"] == "/home/ann/project2/tt.yaml"
    assert environment["PYTHONPATH"] == (
        "/home/bob/.ttlaunch/releases/abc/package:/home/bob/.ttlaunch/releases/abc/project/src:/opt/other"
    )


def test_a_host_keeps_its_own_home_user_and_path(plan):
    _, content = on_host(plan)
    assert {"HOME", "USER", "PATH"} & set(content["environment"]) == set()


def test_what_the_description_sets_wins_over_the_host(plan):
    _, content = on_host(plan, described=("PATH",))
    assert content["environment"]["PATH"] == "/home/bob/.ttlaunch/releases/abc/project/bin:/usr/bin"


def test_the_interpreter_is_the_hosts(plan):
    _, content = on_host(plan)
    assert content["rank_command"] == ["/home/bob/.ttlaunch/env/bin/python", "-m", "ttlaunch.runtime"]


def test_text_and_checkpoint_are_where_the_host_has_them(plan):
    made = plan("hierarchical_parallel", surroundings={"shell": SHELL})
    file = {"path": "/home/ann/project/runs/r1/checkpoints/step-5/rank-0.safetensors", "sha256": "456", "bytes": 7}
    start = {"origin": "r1", "step": 5, "files": [file], "state": {}}
    program = dataclasses.replace(made.program, data={**made.program.data, "sha256": "123"}, start=start)
    content = plan_on_host(dataclasses.replace(made, program=program), PLACES, python="/opt/venv/bin/python")
    assert content["data"] == {**program.data, "path": "/home/bob/.ttlaunch/data/123"}
    assert content["start"] == {**start, "files": [{**file, "path": "/home/bob/.ttlaunch/data/456"}]}


def test_every_host_has_the_hash_of_the_plan_itself(plan):
    made, content = on_host(plan)
    assert content["hash"] == made.hash
