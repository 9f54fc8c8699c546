"""`ttlaunch init`: what a newcomer gets validates without a warning, with and without Tenstorrent devices."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("recipe", ["", "--recipe hierarchical_parallel", "--recipe data_parallel -n 3"])
@pytest.mark.parametrize("options", ["--hosts box-01,box-02:2", "--plain --hosts box-01:2,box-02:2"])
def test_a_first_cluster_validates_without_a_warning(ttlaunch, monkeypatch, options, recipe):
    monkeypatch.setenv("HOME", "/home/joe")
    assert 0 == ttlaunch(f"init lab {options}").status
    if "--plain" not in options:
        recipe = recipe.replace("data_parallel -n 3", "data_parallel --set multihost_config.num_workers=3")
    answer = ttlaunch(f"validate lab {recipe}")
    assert ("", 0) == (answer.stderr, answer.status)
    assert answer.stdout.startswith("lab is consistent: 2 hosts, ")


def test_plain_writes_the_hosts_alone_and_leaves_the_number_of_ranks_open(ttlaunch, here):
    answer = ttlaunch("init lab --plain --hosts box-01:2,box-02:2")
    assert "wrote configurations/lab/hosts.txt\ncheck it with: ttlaunch validate lab\n" == answer.stdout
    assert ["hosts.txt"] == [path.name for path in (here / "configurations/lab").iterdir()]
    assert "lab is consistent: 2 hosts, 4 slots, world size open\n" == ttlaunch("validate lab").stdout
    assert 0 == ttlaunch("plan data_parallel --on lab -n 4").status


@pytest.mark.parametrize("option", ["--device-shape 1x8", "--arch cpu"])
def test_plain_with_devices_is_refused(ttlaunch, here, option):
    answer = ttlaunch(f"init lab --hosts a --plain {option}")
    said = f"error[P009]: `{option.split()[0]}` describes devices, and `--plain` machines without any"
    assert (2, said) == (answer.status, answer.stderr.partition("\n")[0])
    assert [] == list(here.iterdir())


def test_the_tutorial_about_a_cluster_shows_the_file_that_its_command_writes(ttlaunch, here):
    page = (ROOT / "docs/tutorials/your-first-cluster.md").read_text()
    (command,) = re.findall(r"^ttlaunch (init .*)$", page, flags=re.MULTILINE)
    assert 0 == ttlaunch(command).status
    (shown,) = re.findall(r"^```text\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    written = (here / "configurations/lab/hosts.txt").read_text()
    assert shown.splitlines() == [line for line in written.splitlines() if not line.startswith("#")]


def test_a_configuration_that_hides_a_built_in_one_says_so(ttlaunch):
    note = "note: it hides the built-in configuration `local`, and commands without `--on` use it\n"
    assert note == ttlaunch("init local --plain --hosts box-01").stderr
    assert "note: it hides the built-in configuration `2loudboxes`\n" == ttlaunch("init 2loudboxes --hosts a,b").stderr
    assert "" == ttlaunch("init 5loudboxes --hosts a,b --out elsewhere").stderr
