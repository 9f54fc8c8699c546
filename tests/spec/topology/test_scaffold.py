"""The files that a new configuration starts from."""

import pytest

from ttlaunch.diagnostics import Diagnostic, render
from ttlaunch.spec.topology.load import load_topology
from ttlaunch.spec.topology.scaffold import parse_host_list, scaffold


@pytest.mark.parametrize("hosts", [[("a", 1)], [("a", 1), ("joe@b", 2), ("c.lab", 1)], [("localhost", 4)]])
@pytest.mark.parametrize("arch", ["wormhole_b0", "cpu"])
def test_a_new_configuration_is_correct_as_it_stands(hosts, arch, tmp_path):
    for name, text in scaffold("lab", hosts, arch=arch).items():
        (tmp_path / name).write_text(text)
    loaded = load_topology(tmp_path, name="lab", environment={"HOME": "/home/joe"}, working_folder=tmp_path)
    assert loaded.diagnostics == []
    assert loaded.topology.world_size == sum(slots for _, slots in hosts)
    assert len(loaded.topology.links) == loaded.topology.world_size - 1


def test_every_file_explains_itself():
    assert all(text.startswith("# lab: ") for text in scaffold("lab", [("a", 1)]).values())


def test_a_configuration_needs_a_host_and_a_known_architecture():
    with pytest.raises(ValueError, match="needs a host"):
        scaffold("lab", [])
    with pytest.raises(ValueError, match="wormhole_b0"):
        scaffold("lab", [("a", 1)], arch="potato")


def test_hosts_come_with_their_slots():
    assert parse_host_list("a,b:2, joe@c:3") == [("a", 1), ("b", 2), ("joe@c", 3)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "a,",
        "a:",
        "a:x",
        "a:0",
        "a:-1",
        "a,a",
        "a b",
        "a;b",
        "a\nb",
        "a.x,a.y",
        "$(x)",
        "-a",
        "a:2:3",
        "a:99999999",
    ],
)
def test_what_is_no_list_of_hosts_is_refused(text):
    assert isinstance(parse_host_list(text), Diagnostic)


def test_the_wrong_host_is_marked():
    expected = """\
error[T014]: `--hosts a,b:x`: `b:x` is not a host with a number of slots: a number of slots is a whole number from 1
 --> --hosts:1:3
  |
1 | a,b:x
  |   ^^^ expected `HOST` or `HOST:SLOTS`

hint: write hosts with commas between them: `--hosts a,b:2,c`"""
    assert expected == render([parse_host_list("a,b:x")])
