"""What is named on the command line and is not there ends every command with status 2, a wrong description with 3."""

import pytest

COMMANDS = {
    "run data_parallel": {
        "-c": "c.yaml",
        "--on": "x",
        "--resume": "latest",
        "--hostfile": "h",
        "--rank-bindings": "b.yaml",
    },
    "plan data_parallel": {"-c": "c.yaml", "--on": "x", "--hostfile": "h", "--rank-bindings": "b.yaml"},
    "chaos data_parallel --random 1": {"-c": "c.yaml", "--on": "x", "--resume": "latest", "--hostfile": "h"},
    "simulate data_parallel": {"-c": "c.yaml", "--on": "x"},
    "advise": {"-c": "c.yaml", "--on": "x", "--hostfile": "h", "--rank-bindings": "b.yaml"},
    "place data_parallel": {"-c": "c.yaml", "--on": "x", "--hostfile": "h"},
    "show --recipe data_parallel": {"-c": "c.yaml", "--hostfile": "h"},
    "validate --recipe data_parallel": {"-c": "c.yaml", "--hostfile": "h", "--rank-bindings": "b.yaml"},
    "compare data_parallel": {"--on": "x"},
    "sync": {"--on": "x", "--hostfile": "h"},
    "doctor": {"--on": "x", "--hostfile": "h"},
    "prepare": {"--on": "x", "--hostfile": "h"},
    "submit data_parallel --on slurm:gpu": {"-c": "c.yaml", "--resume": "latest", "--rank-bindings": "b.yaml"},
}


@pytest.mark.parametrize("line", [f"{line} {o} {v}" for line, options in COMMANDS.items() for o, v in options.items()])
@pytest.mark.parametrize("form", ["full", "json"])
def test_an_option_that_names_what_is_not_there_is_a_mistake_on_the_command_line(ttlaunch, here, line, form):
    answer = ttlaunch(f"{line} --format {form}")
    assert 2 == answer.status, answer
    assert ("" == answer.stdout) is (form == "full")
    assert [] == list(here.iterdir())


ARGUMENTS = [
    *("logs", "report", "attach", "metrics", "stop latest", "repro", "diff latest latest", "weights show latest"),
    *(
        "weights export latest w.safetensors",
        "run nope",
        "plan nope",
        "show nope",
        "validate nope",
        "validate nope.yaml",
    ),
    *(
        "convert nope.yaml x.textproto",
        "data nope x",
        "recipes show nope",
        "recipes copy nope",
        "schema train --recipe nope",
    ),
    *(
        "explain X999",
        "simulate nope",
        "advise nope",
        "chaos nope --random 1",
        "place nope",
        "compare nope",
        "report nope",
        "nope",
    ),
    "submit nope --on slurm:gpu",
]


@pytest.mark.parametrize("line", ARGUMENTS)
def test_an_argument_that_names_what_is_not_there_is_a_mistake_on_the_command_line(ttlaunch, here, line):
    answer = ttlaunch(line)
    assert (2, "") == (answer.status, answer.stdout)
    assert answer.stderr.startswith("error[")
    assert [] == list(here.iterdir())


@pytest.mark.parametrize(
    "line", ["plan data_parallel --set a=1", "plan data_parallel -c empty.yaml", "plan -n 3 --on lab x.py"]
)
def test_what_is_there_and_wrong_is_a_wrong_description(ttlaunch, here, line):
    (here / "empty.yaml").write_text("")
    (here / "x.py").write_text("")
    (here / "configurations/lab").mkdir(parents=True)
    assert 3 == ttlaunch(line).status
