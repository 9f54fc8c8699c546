"""How to reach one host: hostfile and cluster.yaml first, then the user's ssh configuration, then the system's.

The same order of precedence as `ssh -l USER -p PORT -i FILE HOST`, so that what works by hand works here.
"""

import getpass
import os
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.address import HostAddress
from ttlaunch.hosts.transport.deadline import render_seconds
from ttlaunch.hosts.transport.quick_paramiko import paramiko
from ttlaunch.hosts.transport.ssh_config_text import UnreadableConfigError, read_config
from ttlaunch.quick_dataclass import dataclass

SSH_PORT = 22
_LARGEST_PORT = 65535
_USUAL_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_MOST_JUMPS = 8
_EXEC_S = 3.0


@dataclass(frozen=True)
class SshFolders:
    """Where ssh keeps what it knows: configuration, keys and known hosts."""

    user: Path = Path("~/.ssh")
    system: Path = Path("/etc/ssh")


@dataclass(frozen=True)
class HostSettings:
    """Everything that a connection to one host needs to know.

    Attributes:
        name: The host's name in the hostfile.
        host_name: The name or address to connect to: `HostName` of the configuration, else the name.
        identity_files: Private keys in the order in which to offer them; ssh's default names if none are given.
        identity_named_in: What names the files: `identity_file` of cluster.yaml or `IdentityFile` of the ssh
            configuration; None if they are the usual ones, which need not exist.
        identities_only: Whether to leave out keys of the SSH agent that are not among the files.
        agent: The socket of the SSH agent.
        jumps: The jump hosts, the nearest one first.
        known_hosts: Files with trusted host keys, the user's first.
        host_key_alias: The name under which those files know the host.
        connect_timeout_s: `ConnectTimeout`; the sooner of it and the caller's deadline counts.
        by_hand: The ssh command that makes the same connection, without a command to run.
    """

    name: str
    host_name: str
    port: int
    user: str
    identity_files: tuple[Path, ...]
    identities_only: bool
    agent: Path | None
    known_hosts: tuple[Path, ...]
    by_hand: tuple[str, ...]
    identity_named_in: str | None = None
    host_key_alias: str | None = None
    connect_timeout_s: float | None = None
    proxy_command: str | None = None
    jumps: tuple["HostSettings", ...] = field(default=())

    def error(
        self,
        trouble: Trouble,
        evidence: str,
        *,
        notes: tuple[str, ...] = (),
        hints: tuple[str, ...] = (),
        by_hand: bool = True,
    ) -> HostError:
        """A trouble with this host; `by_hand` adds the hint that shows what ssh itself says."""
        if by_hand:
            words = ["ssh", "-o", "BatchMode=yes", *self.by_hand, "true"]
            hints = (*hints, f"try it by hand: `{shlex.join(words)}`")
        return HostError(self.name, trouble, evidence, notes=notes, hints=hints)


def resolve_settings(address: HostAddress, *, folders: SshFolders, depth: int = 0) -> HostSettings:
    """Look a host up in the ssh configuration; may ask DNS and run commands of `Match exec`.

    Raises:
        HostError: SETTINGS, with the file and the reason.
    """
    try:
        return _settings(address, _lookup(address, folders), folders=folders, depth=depth)
    except RuntimeError as error:
        raise HostError(address.name, Trouble.SETTINGS, f"the ssh configuration cannot be found: {error}") from error
    except UnreadableConfigError as error:
        raise HostError(
            address.name, Trouble.SETTINGS, f"the ssh configuration cannot be used: {error.where}: {error.reason}"
        ) from error


def _lookup(address: HostAddress, folders: SshFolders) -> dict[str, Any]:
    user_folder = folders.user.expanduser()
    config = _Config()
    ours = [("User", address.user), ("Port", address.port), ("IdentityFile", address.identity_file)]
    # The first value that is found for an option counts, so the order of these three is their precedence.
    config.parse([f"{key} {value}" for key, value in ours if value is not None])
    config.parse(read_config(user_folder / "config", folder=user_folder))
    config.parse(read_config(folders.system / "ssh_config", folder=folders.system))
    try:
        return dict(config.lookup(address.name))
    except (paramiko.SSHException, KeyError, ValueError) as error:
        # CanonicalizeHostname without CanonicalDomains, a name that does not resolve, a number that is none
        raise UnreadableConfigError(f"Host {address.name}", f"{type(error).__name__} {error}") from error


def _settings(address: HostAddress, options: dict[str, Any], *, folders: SshFolders, depth: int) -> HostSettings:
    me = _own_name()
    user = options.get("user") or me
    port = _number(options, "port", SSH_PORT)
    if not 1 <= port <= _LARGEST_PORT:
        raise UnreadableConfigError(f"Host {address.name}", f"port {port} does not exist")
    timeout = _number(options, "connecttimeout", 0)
    proxy = _proxy(options)
    jumps = _jumps(options[proxy], address, folders=folders, depth=depth) if proxy == "proxyjump" else ()
    tokens = {"%d": str(Path.home()), "%h": options["hostname"], "%r": user, "%u": me, "%%": "%"}
    return HostSettings(
        name=address.name,
        host_name=options["hostname"],
        port=port,
        user=user,
        identity_files=_identity_files(options, folders),
        identities_only=options.get("identitiesonly", "no").lower() in {"yes", "true"},
        agent=_agent(options.get("identityagent"), os.environ, tokens),
        known_hosts=(
            *_files(options.get("userknownhostsfile"), folders.user / "known_hosts", tokens),
            *_files(options.get("globalknownhostsfile"), folders.system / "ssh_known_hosts", tokens),
        ),
        by_hand=_by_hand(address, user=user, port=port),
        identity_named_in=_identity_named_in(address, options),
        host_key_alias=options.get("hostkeyalias"),
        connect_timeout_s=timeout or None,
        proxy_command=options[proxy] if proxy == "proxycommand" else None,
        jumps=jumps,
    )


def _own_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without an entry, as in some containers
        return str(os.getuid())


def _number(options: Mapping[str, Any], key: str, default: int) -> int:
    value = options.get(key, default)
    if str(value).lower() == "none":
        return default
    try:
        return int(value)
    except ValueError as error:
        raise UnreadableConfigError(key, f"`{value}` is not a number") from error


def _proxy(options: Mapping[str, Any]) -> str | None:
    """Return which of ProxyJump and ProxyCommand counts, if any: ssh uses the first one and ignores the other."""
    first = next((key for key in options if key in {"proxyjump", "proxycommand"}), None)
    return None if first is None or (options[first] or "none").lower() == "none" else first


def _jumps(text: str, address: HostAddress, *, folders: SshFolders, depth: int) -> tuple[HostSettings, ...]:
    """The settings of each hop of a ProxyJump; the nearest hop may itself be reached through others."""
    if depth >= _MOST_JUMPS:
        raise UnreadableConfigError(f"Host {address.name}", f"`ProxyJump {text}` leads in a circle")
    hops: list[HostSettings] = []
    for number, part in enumerate(text.split(",")):
        settings = resolve_settings(_parse_hop(part.strip(), address), folders=folders, depth=depth + 1)
        hops += [*settings.jumps, settings] if number == 0 else [settings]
    return tuple(hops)


def _parse_hop(text: str, address: HostAddress) -> HostAddress:
    """`[user@]host[:port]` or `ssh://[user@]host[:port]`, with IPv6 addresses in brackets."""
    user, _, place = text.removeprefix("ssh://").rstrip("/").rpartition("@")
    name, port = place, ""
    if place.startswith("["):
        name, _, rest = place[1:].partition("]")
        port = rest.removeprefix(":")
    elif place.count(":") == 1:
        name, _, port = place.partition(":")
    if not name or (port and not port.isdigit()):
        raise UnreadableConfigError(f"Host {address.name}", f"`ProxyJump {text}` names no host")
    return HostAddress(name, user=user or None, port=int(port) if port else None)


def _identity_files(options: Mapping[str, Any], folders: SshFolders) -> tuple[Path, ...]:
    named = options.get("identityfile") or [str(folders.user / name) for name in _USUAL_KEYS]
    return tuple(dict.fromkeys(Path(name).expanduser() for name in named if name.lower() != "none"))


def _identity_named_in(address: HostAddress, options: dict[str, Any]) -> str | None:
    if address.identity_file is not None:
        return "`identity_file` of cluster.yaml"
    return "`IdentityFile` of the ssh configuration" if options.get("identityfile") else None


def _agent(option: str | None, environment: Mapping[str, str], tokens: Mapping[str, str]) -> Path | None:
    if option is not None and option.lower() == "none":
        return None
    if option is None or option == "SSH_AUTH_SOCK":
        value = environment.get("SSH_AUTH_SOCK")
    elif option.startswith("$"):
        value = environment.get(option[1:].strip("{}"))
    else:
        value = _replace(option, tokens)
    return Path(value).expanduser() if value else None


def _files(option: str | None, usual: Path, tokens: Mapping[str, str]) -> tuple[Path, ...]:
    if option is None:
        return (usual.expanduser(), usual.with_name(f"{usual.name}2").expanduser())
    names = shlex.split(option)
    return tuple(Path(_replace(name, tokens)).expanduser() for name in names if name.lower() != "none")


def _replace(text: str, tokens: Mapping[str, str]) -> str:
    for token, value in tokens.items():
        text = text.replace(token, value)
    return text


def _by_hand(address: HostAddress, *, user: str, port: int) -> tuple[str, ...]:
    identity = ("-i", str(address.identity_file)) if address.identity_file else ()
    return (*(("-p", str(port)) if port != SSH_PORT else ()), *identity, f"{user}@{address.name}")


class _Config(paramiko.SSHConfig):
    """Runs the commands of `Match exec` without a terminal and only where all other criteria hold."""

    def _does_match(self, match_list: list[dict[str, Any]], target_hostname: str, *rest: Any) -> Any:
        commands = [criterion for criterion in match_list if criterion["type"] == "exec"]
        others = [criterion for criterion in match_list if criterion["type"] != "exec"]
        # paramiko would run a command even where `host` or `user` beside it already rules the block out; ssh does not.
        matched = super()._does_match(others, target_hostname, *rest)  # type: ignore[misc]
        if not commands or (others and not matched):
            return matched
        return all(self._succeeds(criterion, target_hostname, rest[-1]) for criterion in commands)

    def _succeeds(self, criterion: dict[str, Any], target_hostname: str, options: dict[str, Any]) -> bool:
        command = self._tokenize(options, target_hostname, "match-exec", criterion["param"])  # type: ignore[attr-defined]
        try:
            ended = subprocess.run(
                ["/bin/sh", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
                timeout=_EXEC_S,
            )
        except subprocess.TimeoutExpired as error:
            reason = f"`{command}` has not ended within {render_seconds(_EXEC_S)}"
            raise UnreadableConfigError("Match exec", reason) from error
        return bool((ended.returncode == 0) != criterion["negate"])
