"""The ssh configuration means the same to us as to ssh itself: what `ssh -G` prints is the oracle."""

import getpass
import shutil
import subprocess

import pytest

from tests.hosts.transport.says import says
from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.address import HostAddress
from ttlaunch.hosts.transport.ssh_config import resolve_settings

CONFIGS = {
    "nothing": "",
    "host": "Host box\n  HostName 10.0.0.7\n  User ttuser\n  Port 2222\n",
    "first value counts": "Host box\n  Port 1\nHost *\n  Port 2\n  User late\n",
    "pattern": "Host metal-* !metal-0?\n  User no\nHost b?x *.lab\n  User yes\n",
    "equals sign and quotes": 'Host box\n  User="tt user"\n  HostName = box.lab\n',
    "upper case": "HOST box\n  USER ttuser\n  pOrT 77\n",
    "tokens": "Host box\n  HostName %h.example.com\n",
    "comments": "# all of them\nHost box # this one\n  User ttuser # me\n  Port 2022\n",
    "match host": "Match host box\n  User matched\n",
    "match original host": "Host box\n  HostName real\nMatch originalhost box\n  Port 3\nMatch host real\n  User found\n",
    "match upper case": "Match Host box\n  User matched\nMatch HOST other\n  Port 9\n",
    "match negated": "Match !host other\n  User matched\n",
    "match several": "Match host box user nobody\n  Port 9\nMatch host box localuser {me}\n  User both\n",
    "match all": "Host other\n  Port 9\nMatch all\n  User everyone\n",
    "match exec": 'Match exec "test %h = box"\n  User yes\nMatch exec "false"\n  Port 9\nMatch !exec "false"\n  Port 8\n',
    "match final": "Host box\n  HostName real\nMatch final host real\n  User final\n",
    "include": "Include more.d/*.conf\nHost box\n  Port 5\n",
    "include within a host": "Host other\n  Include more.d/*.conf\n  Port 9\nHost box\n  Include more.d/*.conf\n  Port 6\n",
    "include of nothing": "Include none/*\nHost box\n  User ttuser\n",
    "jump": "Host box\n  ProxyJump me@gate:2200\n",
    "jump none": "Host box\n  ProxyJump none\nHost *\n  ProxyJump gate\n",
    "identity files": "Host box\n  IdentityFile ~/.ssh/one\n  IdentityFile /keys/%r/two\n  User ttuser\n",
}
MORE = "User included\nHost box\n  ConnectTimeout 7\nHost other\n  ConnectTimeout 8\nMatch host box\n  HostName deep\n"


def resolve(somebody, name="box", **address):
    return resolve_settings(HostAddress(name, **address), folders=somebody.folders)


def of_ssh(user, *arguments, name="box"):
    """What ssh itself makes of the configuration: values by lower-case keyword."""
    ssh = shutil.which("ssh")
    path = user.folders.user / "config"
    printed = subprocess.run(
        [ssh, "-F", path, "-G", *arguments, name],
        capture_output=True,
        text=True,
        check=True,
        cwd=user.folders.user,
    ).stdout
    values = {}
    for line in printed.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key, []).append(value)
    return values


@pytest.fixture
def configured(user):
    """`configured(text)`: the user's configuration, in which files to include lie beside it."""

    def write(text):
        user.write("more.d/a.conf", MORE)
        # `ssh -F FILE` looks for relative includes in the real ~/.ssh, so the path is spelled out for both
        text = text.replace("Include ", f"Include {user.folders.user}/").replace("{me}", getpass.getuser())
        user.configure(text)
        return user

    return write


@pytest.mark.parametrize("text", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("arguments", [{}, {"user": "typed", "port": 4444}], ids=["as configured", "as typed"])
def test_a_configuration_means_what_it_means_to_ssh(configured, text, arguments):
    user = configured(text)
    typed = ["-l", "typed", "-p", "4444"] if arguments else []
    theirs, ours = of_ssh(user, *typed), resolve(user, **arguments)
    assert ours.host_name == theirs["hostname"][0]
    assert ours.port == int(theirs["port"][0])
    assert ours.user == theirs["user"][0]
    timeout = theirs.get("connecttimeout", ["none"])[0]
    assert ours.connect_timeout_s == (None if timeout == "none" else int(timeout))
    jumps = theirs.get("proxyjump", ["none"])[0]
    assert len(ours.jumps) == (0 if jumps == "none" else len(jumps.split(",")))


def test_the_hostfile_comes_before_the_users_file_and_that_before_the_systems(user):
    user.configure("Host box\n  User second\n")
    user.system_configure("User third\nPort 3333\nHost box\n  HostName system\n")
    typed, configured = resolve(user, user="first", port=1), resolve(user)
    assert (typed.user, typed.port, typed.host_name) == ("first", 1, "system")
    assert (configured.user, configured.port, configured.host_name) == ("second", 3333, "system")


def test_a_named_identity_file_is_offered_before_those_of_the_configuration(user, tmp_path):
    user.configure("IdentityFile ~/.ssh/other\nIdentitiesOnly yes\n")
    settings = resolve(user, identity_file=tmp_path / "mine")
    assert [path.name for path in settings.identity_files] == ["mine", "other"]
    assert settings.identities_only


def test_usual_names_of_keys_are_tried_when_none_is_configured(user):
    assert [path.name for path in resolve(user).identity_files] == ["id_ed25519", "id_ecdsa", "id_rsa"]


def test_a_jump_host_may_itself_be_behind_another(user):
    user.configure("Host box\n  ProxyJump inner\nHost inner\n  ProxyJump gate:77\n  User guest\n")
    assert [(hop.name, hop.port, hop.user) for hop in resolve(user).jumps] == [
        ("gate", 77, resolve(user).user),
        ("inner", 22, "guest"),
    ]


def test_of_two_ways_to_go_through_another_host_the_first_counts(user):
    user.configure("Host box\n  ProxyCommand nc %h %p\n  ProxyJump gate\n")
    assert (resolve(user).proxy_command, resolve(user).jumps) == ("nc box 22", ())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Host box\n  Port many\n", "settings: the ssh configuration cannot be used: port: `many` is not a number"),
        (
            "Host box\n  Port 70000\n",
            "settings: the ssh configuration cannot be used: Host box: port 70000 does not exist",
        ),
        ("\nHost box\n  User\n", "settings: the ssh configuration cannot be used: SSH/config:3: `User` has no value"),
        (
            "Match tagged fast\n  User x\n",
            "settings: the ssh configuration cannot be used: SSH/config:1: criterion `tagged` of `Match` is not supported",
        ),
        (
            "Match host\n  User x\n",
            "settings: the ssh configuration cannot be used: SSH/config:1: criterion `host` of `Match` has no value",
        ),
        (
            'Host "box\n',
            'settings: the ssh configuration cannot be used: SSH/config:1: `"box`: no closing quotation',
        ),
        (
            "Host box\n  ProxyJump gate\nHost gate\n  ProxyJump box\n",
            "settings: the ssh configuration cannot be used: Host box: `ProxyJump gate` leads in a circle",
        ),
        (
            "Host box\n  ProxyJump me@:22\n",
            "settings: the ssh configuration cannot be used: Host box: `ProxyJump me@:22` names no host",
        ),
        (
            "Include config\n",
            "settings: the ssh configuration cannot be used: SSH/config: it is included more than 16 levels deep",
        ),
    ],
)
def test_what_cannot_be_followed_is_named_with_its_place(configured, text, words):
    user = configured(text)
    assert words == says(lambda: resolve(user), names={str(user.folders.user): "SSH"})


def test_a_configuration_that_cannot_be_read_is_no_traceback(user):
    (user.folders.user / "config").mkdir()
    with pytest.raises(HostError) as caught:
        resolve(user)
    assert caught.value.trouble is Trouble.SETTINGS
    assert caught.value.evidence.endswith("config: is a directory")


def test_a_command_of_match_exec_that_hangs_is_named(user):
    user.configure("Match exec 'sleep 30'\n  User x\n")
    with pytest.raises(HostError) as caught:
        resolve(user)
    assert caught.value.evidence == (
        "the ssh configuration cannot be used: Match exec: `sleep 30` has not ended within 3 s"
    )
