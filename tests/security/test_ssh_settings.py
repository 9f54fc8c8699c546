"""Names in a stranger's cluster files reach no shell, although the user's own ssh configuration hands names to shells."""

import pytest

CONFIG = """\
Match exec "true %h %n %r"
  ServerAliveInterval 5
Host *
  ProxyCommand false %h %n %r %p
"""


@pytest.fixture
def home(tmp_path_factory, monkeypatch):
    """A user whose ssh configuration runs commands with names of hosts and users."""
    folder = tmp_path_factory.mktemp("home")
    (folder / ".ssh").mkdir(mode=0o700)
    (folder / ".ssh/config").write_text(CONFIG)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return folder


HOSTILE = {
    "scope of an address": ("fe80::1%;touch${IFS}trace; slots=1\n", ""),
    "host": ("a;touch${IFS}trace; slots=1\n", ""),
    "user": ("$(touch${IFS}trace)@node1 slots=1\n", ""),
    "user of the cluster": ("node1 slots=1\n", "user: x;touch${IFS}trace;\n"),
    "another line in the user": ("node1 slots=1\n", 'user: "x\\nProxyCommand touch trace"\n'),
    "another line in the key": ("node1 slots=1\n", 'identity_file: "x\\nProxyCommand touch trace"\n'),
}


@pytest.mark.parametrize(("hosts", "cluster"), HOSTILE.values(), ids=HOSTILE)
def test_no_name_in_a_cluster_file_runs_a_command(home, here, ttlaunch, hosts, cluster):
    lab = here / "lab"
    lab.mkdir()
    (lab / "hosts.txt").write_text(hosts)
    if cluster:
        (lab / "cluster.yaml").write_text(cluster)
    answer = ttlaunch("doctor --on lab")
    assert not (here / "trace").exists()
    assert answer.status in {3, 4}


def test_an_ssh_configuration_of_the_current_folder_is_not_read(home, here, ttlaunch):
    for name in (".ssh/config", "ssh_config", "config", "lab/.ssh/config"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("Host *\n  ProxyCommand touch trace\nMatch exec 'touch trace'\n  User x\n")
    (here / "lab/hosts.txt").write_text("node1 slots=1\n")
    assert 4 == ttlaunch("doctor --on lab").status
    assert not (here / "trace").exists()
