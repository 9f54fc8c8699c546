"""The same programs on three kinds of hosts, and an sshd of a test's own with the user's ssh folder beside it."""

import shlex
import shutil
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.loopback import start_loopback_sshd, why_no_loopback_sshd
from tests.hosts.transport.programs import PROGRAMS, SHELL
from tests.hosts.transport.says import expected, says
from ttlaunch.hosts.transport.address import HostAddress
from ttlaunch.hosts.transport.key_ring import KeyRing
from ttlaunch.hosts.transport.local import LocalTransport
from ttlaunch.hosts.transport.memory import MemoryTransport
from ttlaunch.hosts.transport.ssh import SshTransport
from ttlaunch.hosts.transport.ssh_config import SshFolders
from ttlaunch.hosts.transport.transport import Transport


@dataclass
class TestHost:
    """A connected host, and how to say on it what it should do."""

    __test__ = False
    transport: Transport
    shell: bool

    def line(self, name, *arguments):
        """The command line of a program of `programs.py`."""
        return shlex.join([name, *map(str, arguments)]) if not self.shell else SHELL[name].format(*arguments)

    def start(self, name, *arguments):
        return self.transport.start(self.line(name, *arguments), timeout_s=10)


@contextmanager
def _host(request):
    if request.param == "ssh":
        transport = request.getfixturevalue("reach")(request.getfixturevalue("loopback_sshd"))
        transport.connect()
    elif request.param == "local":
        transport = LocalTransport("localhost")
    else:
        transport = MemoryTransport("localhost", PROGRAMS)
    yield TestHost(transport, shell=request.param != "memory")
    transport.close()


@pytest.fixture(params=["ssh", "local", "memory"])
def host(request):
    """A `TestHost` of each kind."""
    with _host(request) as made:
        yield made


@pytest.fixture(params=["ssh", "local"])
def shell_host(request):
    """A host of each kind that has a shell."""
    with _host(request) as made:
        yield made


@dataclass
class User:
    """A user's ssh folder and what they type into it."""

    folders: SshFolders

    def configure(self, text):
        self.write("config", text)

    def system_configure(self, text):
        self._put(self.folders.system / "ssh_config", text)

    def system_know(self, text):
        self._put(self.folders.system / "ssh_known_hosts", text)

    def know(self, text):
        self.write("known_hosts", text)

    def write(self, name, text, *, mode=0o600):
        path = self.folders.user / name
        self._put(path, text)
        path.chmod(mode)
        return path

    def trust(self, sshd):
        """Know the host's key, and have a key that it accepts."""
        self.know(sshd.known_hosts.read_text(encoding="utf-8"))
        self.write("id_ed25519", sshd.identity_file.read_text(encoding="utf-8"))
        return self

    def _put(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Somebody who has never used ssh before and has no agent."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    folders = SshFolders(user=tmp_path / "home/.ssh", system=tmp_path / "etc/ssh")
    folders.user.mkdir(parents=True, mode=0o700)
    return User(folders)


@pytest.fixture
def start_sshd(skip_or_fail):
    """`start_sshd(MaxSessions=1)`: an sshd of this test's own."""
    if reason := why_no_loopback_sshd():
        skip_or_fail(reason)
    with ExitStack() as running:
        yield lambda **settings: running.enter_context(start_loopback_sshd(**settings))


@pytest.fixture
def transports():
    """Those that a test makes; closed when it ends."""
    made = []
    yield made
    for transport in made:
        transport.close()


@pytest.fixture
def named(user, transports):
    """`named("box", user=…)`: a transport of the user to a host by that name."""

    def make(name, *, keys=None, **address):
        transport = SshTransport(HostAddress(name, **address), keys=keys or KeyRing(), folders=user.folders)
        transports.append(transport)
        return transport

    return make


@pytest.fixture
def reach(user, named):
    """`reach(sshd)`: a transport of a user who trusts that sshd and whom it lets in."""

    def make(sshd, *, keys=None):
        user.trust(sshd)
        return named(sshd.address, user=sshd.user, port=sshd.port, keys=keys)

    return make


@pytest.fixture
def check(user):
    """`check(transport, sshd, text)`: connecting says exactly that."""

    def compare(transport, sshd, text, *, timeout_s=10):
        names = {
            str(user.folders.user): "SSH",
            str(user.folders.system): "ETC",
            str(sshd.folder): "SSHD",
            str(sshd.port): "PORT",
            f"{sshd.user}@": "USER@",
            f"as {sshd.user} ": "as USER ",
        }
        assert expected(text) == says(lambda: transport.connect(timeout_s=timeout_s), names=names)

    return compare


@pytest.fixture
def fake_python(tmp_path):
    """`fake_python("2.7.18")`: a folder with a python3 that calls itself by that version."""

    def make(version):
        folder = tmp_path / f"python-{version}"
        folder.mkdir()
        major, minor, *_ = version.split(".")
        real = shutil.which("python3")
        path = folder / "python3"
        path.write_text(
            "#!/bin/sh\n"
            "for last; do :; done\n"
            f'exec {real} -c "import sys; sys.version_info = ({major}, {minor}, 0); exec(sys.argv[1])" "$last"\n',
            encoding="utf-8",
        )
        path.chmod(0o755)
        return folder

    return make


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def descriptors():
    """How many files this process has open."""
    return open_descriptors
