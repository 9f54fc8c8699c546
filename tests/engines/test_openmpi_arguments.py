"""`--mpi-args`: words that name hosts become hosts, words that the plan decides are refused, others go to mpirun."""

import pytest

from ttlaunch.diagnostics import Format, render
from ttlaunch.engines.openmpi import OpenMpiFinder
from ttlaunch.engines.openmpi_arguments import own_settings, parse_mpi_args


def check(text, *, hosts=None, hostfile=None, passed=(), messages=()):
    words, found = parse_mpi_args(text)
    assert hosts == (words.hosts.text if words.hosts else None)
    assert (hostfile, passed) == (words.hostfile, tuple(words.passed))
    lines = [f"{each.severity}[{each.code}]: {each.message}" for each in found]
    assert list(messages) == lines


def decided(word):
    return f"error[P015]: `{word}` in `--mpi-args` sets what the plan decides"


@pytest.mark.parametrize("option", ["--host a,b:2", "-host a,b:2", "-H a,b:2", "--host=a,b:2", "-H a -H b:2"])
def test_hosts_are_a_hostfile(option):
    check(option, hosts="a slots=1\nb slots=2")


def test_slots_of_a_host_that_is_named_again_add_up():
    check("--host a,b,a:2", hosts="a slots=3\nb slots=1")


def test_addresses_of_six_bytes_keep_their_colons():
    check("--host fe80::1,[fe80::2]:4", hosts="fe80::1 slots=1\nfe80::2 slots=4")


@pytest.mark.parametrize("option", ["--hostfile", "-hostfile", "--machinefile", "-machinefile"])
def test_a_hostfile_is_named(option):
    check(f"{option} 'my hosts.txt'", hostfile="my hosts.txt")


@pytest.mark.parametrize(
    "word", ["-n", "-np", "--np", "--n", "-c", "--map-by", "--rankfile", "-wdir", "--rank-by", "-N"]
)
def test_what_the_plan_decides_is_refused_with_its_value(word):
    check(f"{word} 4 --mca x y", passed=("--mca", "x", "y"), messages=[decided(word)])


def test_a_value_behind_an_equals_sign_goes_with_its_word():
    check("--map-by=node --oversubscribe", passed=("--oversubscribe",), messages=[decided("--map-by=node")])


def test_everything_else_is_passed_on_as_a_shell_would_split_it():
    text = "--mca btl self,tcp -x 'A=b c' --mca btl_tcp_if_include 10.0.0.0/8 --bind-to core"
    passed = (
        "--mca",
        "btl",
        "self,tcp",
        "-x",
        "A=b c",
        "--mca",
        "btl_tcp_if_include",
        "10.0.0.0/8",
        "--bind-to",
        "core",
    )
    check(text, passed=passed)


def test_marks_of_mpirun_would_hide_those_of_the_ranks():
    left_out = "in `--mpi-args` is ignored: ttlaunch marks lines by rank and keeps them per rank"
    messages = [f"warning[P015]: `{word}` {left_out}" for word in ("--tag-output", "--output-filename")]
    check("--tag-output --output-filename logs/job -x A", passed=("-x", "A"), messages=messages)


def test_two_ways_to_name_hosts_are_one_too_many():
    message = "error[P015]: `--mpi-args` names hosts in several ways; one was expected"
    check("-H a --hostfile b", hosts="a slots=1", hostfile="b", messages=[message])
    check("--machinefile a --hostfile b", hostfile="a", messages=[message])


def test_a_program_is_no_option():
    check(
        "hostname -f", passed=("-f",), messages=["error[P015]: `hostname` in `--mpi-args` is not an option of mpirun"]
    )


def test_an_option_without_its_hosts_and_an_open_quotation_are_refused():
    check("--host -x A", passed=("-x", "A"), messages=["error[P015]: `--host` names no host"])
    check("-x 'A", messages=["error[P015]: `--mpi-args` cannot be split into arguments: no closing quotation"])


def test_a_mistake_is_shown_at_its_word():
    _, found = parse_mpi_args("-x n=1 -n 3")
    assert render(found, form=Format.FULL, colour=False) == (
        "error[P015]: `-n` in `--mpi-args` sets what the plan decides\n"
        " --> --mpi-args:1:8\n"
        "  |\n"
        "1 | -x n=1 -n 3\n"
        "  |        ^^ `--ranks` or the bindings say how many ranks there are\n"
        "\n"
        "hint: leave `-n` out"
    )


def test_a_setting_that_the_words_have_is_not_given_twice():
    ours = [("--bind-to", "none"), ("--mca", "pml", "ob1"), ("--mca", "btl", "self,sm,tcp")]
    assert ["--mca", "pml", "ob1"] == own_settings(ours, ["-bind-to", "core", "--mca", "btl", "self,tcp"])
    assert ["--bind-to", "none", "--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"] == own_settings(
        ours, ["-x", "A"]
    )


def test_a_secret_never_stands_on_the_command_line_of_mpirun():
    message = "error[P015]: `API_KEY=***` in `--mpi-args` would show a secret to every user of this machine"
    check("-x A=1 -x API_KEY=hush -x API_KEY", passed=("-x", "A=1", "-x", "-x", "API_KEY"), messages=[message])


@pytest.mark.mpi
@pytest.mark.parametrize(("text", "unknown"), [("--bind-to core --bogus 1", "--bogus"), ("--bind-to core", None)])
def test_the_machines_mpirun_is_asked_which_options_it_knows(text, unknown):
    _, found = OpenMpiFinder().parse_arguments(text)
    message = f"`{unknown}` in `--mpi-args` is not an option of this machine's mpirun"
    assert ([message] if unknown else []) == [each.message for each in found]
    assert [text.index("--bogus") + 1 for _ in found] == [each.primary.span.column for each in found]
