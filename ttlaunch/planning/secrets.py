"""Keep secrets out of everything that is written or shown: a plan names them, and their values travel beside it.

In the training configuration and in environments, the value `env:NAME` stands for the launching shell's variable `NAME`.
A variable or an argument that looks secret is hidden too, even if a file gives its value literally or the user types it. The
name may show that it is secret (`HF_TOKEN`, `--db-password`), or the value itself (a URL with a password, a private key). Ranks find the
values in their environment; see `agent/shim.py` and `runtime/entry.py`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from ttlaunch import contract
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.quick_pattern import quick_pattern

_WORD_ENDS = quick_pattern(r"(?<=[a-z0-9])(?=[A-Z])|[-.]+")
_ENDS_SECRET = quick_pattern(
    r"""
    (?: (?:\A|_)(?:KEY|TOKEN|SECRETS?|PASS|PAT|AUTH|AUTHORIZATION|COOKIES?|CREDENTIALS?|CREDS|JWT|BEARER|DSN|SAS)
      | _PWD | (?:_|BIND|USER|ROOT|DB)PW | (?:SSH|DB|USER|ROOT|LDAP|MAIL|SMTP|REDIS)PASS | (?:API|ACCESS|SECRET|PRIVATE|ENCRYPTION)KEYS?
      | (?:AUTH|ACCESS|API|HF|GH|GITHUB|GITLAB|SLACK)_?TOKENS? | PASSWORDS? | PASSWD | PASSPHRASE | CONNECTION_STRING
      | (?:\A|_)(?:API|ACCESS|SECRET|PRIVATE|ENCRYPTION)_KEYS | MNEMONIC | SEED_PHRASE | AUTH_CONFIG | WEBHOOK_URL )
    [0-9]*(?:_(?:B64|BASE64|HEX|JSON|PEM|VALUE|STRING|OLD|NEW|PROD|DEV|[0-9]+))*\Z
    """,
    re.VERBOSE,
)
_HAS_SECRET = quick_pattern(
    r"(?:\A|_)(?:API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTHORIZATION|COOKIE)(?:_|\Z)"
)
_ABOUT_A_SECRET = quick_pattern(
    r"(?<!WEBHOOK)_(?:FILE|PATH|DIR|FOLDER|NAME|ID|URL|HOST|REGION|TTL|TIMEOUT|SIZE|LENGTH|COUNT|MAX|MIN|TYPE)\Z"
)
"""Names such as `AWS_ACCESS_KEY_ID` and `PASSWORD_FILE`, whose values are not secret."""
_PLAIN = quick_pattern(
    r"(?:\A|_)(?:(?:PAD|EOS|BOS|UNK|SEP|CLS|_MASK|STOP|START|END|SPECIAL|PER)_TOKEN"
    r"|(?:SORT|PRIMARY|FOREIGN|CACHE|GROUP|PARTITION|PUBLIC|ROW)_KEY)\Z"
)
_SECRET_VALUE = quick_pattern(
    r"""
      [a-z][a-z0-9+.-]*://[^/?\#\s:@]*:[^/?\#\s@]+@                       # a URL with a password
    | [?&](?:[a-z_-]*(?:token|password|secret|signature|api_?key)|sig)=[^&\s]    # or with one among its parameters
    | \b(?:password|passwd|pwd|accountkey|sharedaccesskey)\s*=\s*[^\s;]     # what databases call a connection string
    | -----BEGIN[ ][A-Z0-9 ]*PRIVATE[ ]KEY-----
    | \bLS0tLS1CRUdJTi                                                     # "-----BEGIN " in base64
    | [a-z][a-z0-9+.-]*://[^/?\#\s:@]{20,}@                                # with a token in place of a user
    | ://hooks\.slack\.com/services/\S
    | \b(?:password|passwd|api_?key|client_?secret)["']?\s*:\s*[^\s,}]      # in JSON or YAML
    | \b(?:authorization|cookie|x-[a-z-]*(?:key|token))\s*:\s*\S | \bbearer\s+[a-z0-9._~+/=-]{16}
    | \bgh[pousr]_[a-z0-9]{16} | \bgithub_pat_[a-z0-9_]{16} | \bglpat-[a-z0-9_-]{16} | \bhf_[a-z0-9]{16}
    | \bsk-[a-z0-9_-]{20} | \bxox[abeoprs]-[a-z0-9-]{10} | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b
    | \bAIza[a-z0-9_-]{35} | \bnpm_[a-z0-9]{36} | \b[rs]k_live_[a-z0-9]{10} | \bdckr_pat_[a-z0-9_-]{10} | \bpypi-AgE[a-z0-9_-]{10}
    | \bSG\.[a-z0-9_-]{16,}\.[a-z0-9_-]{16} | \bAGE-SECRET-KEY-1[a-z0-9]{20}
    | \beyJ[a-z0-9_-]{8,}\.eyJ[a-z0-9_-]{8,}\.                             # a JSON web token
    """,
    re.VERBOSE | re.IGNORECASE,
)
_ASSIGNED = quick_pattern(r"(?:--?|\+\+?)?([A-Za-z_][\w.-]*)=(.+)", re.DOTALL)
_OPTION = quick_pattern(r"--?([A-Za-z_][\w.-]*)")
_MASK = "***"


def is_secret_name(name: str) -> bool:
    """Whether the name of a variable or an option says that its value is secret: `PGPASSWORD`, `gh-pat`, `apiKey`."""
    name = _WORD_ENDS.sub("_", name).upper()
    if _ABOUT_A_SECRET.search(name) or _PLAIN.search(name):
        return False
    return bool(_ENDS_SECRET.search(name) or _HAS_SECRET.search(name))


def is_secret(name: str, value: str) -> bool:
    """Whether a variable's value has to be hidden, because of its name or because of the value itself."""
    return bool(value) and (is_secret_name(name) or bool(_SECRET_VALUE.search(value)))


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line with `***` in place of secrets."""
    return [before + (_MASK if secret else "") for before, secret in map(_split, arguments, ["", *arguments[:-1]])]


def _split(argument: str, previous: str) -> tuple[str, str]:
    """Split an argument, given the one before it, into the part that may be shown and the secret at its end."""
    option = _OPTION.fullmatch(previous)
    if option and is_secret_name(option[1]) and argument and not argument.startswith("-"):
        return "", argument
    assigned = _ASSIGNED.fullmatch(argument)
    if assigned and is_secret_name(assigned[1]):
        return argument[: assigned.start(2)], assigned[2]
    nested = _ASSIGNED.fullmatch(assigned[2]) if assigned else None  # `--env=HF_TOKEN=…`
    if assigned and nested and is_secret_name(nested[1]):
        return argument[: assigned.start(2) + nested.start(2)], nested[2]
    parts = argument.split()  # a command for `bash -c`
    inside = len(parts) > 1 and any(secret for _, secret in map(_split, parts, ["", *parts[:-1]]))
    return ("", argument) if inside or _SECRET_VALUE.search(argument) else (argument, "")


@dataclass(frozen=True)
class Hidden:
    """Environments and a command line with references in place of secret values.

    Attributes:
        environment: The variables that all ranks share.
        rows: Each rank's own variables.
        command: The arguments of the command line.
        secrets: The value of each variable that a reference names.
    """

    environment: Mapping[str, str]
    rows: Sequence[Mapping[str, str]]
    command: tuple[str, ...]
    secrets: Mapping[str, str] = field(repr=False)


def hide_secrets(
    environment: Mapping[str, str],
    rows: Sequence[Mapping[str, str]],
    config: Any,
    *,
    shell: Mapping[str, str],
    command: Sequence[str] = (),
) -> Hidden:
    """Replace secret values in environments and a command line by references, and collect the values of all references.

    Variables that the shell lacks are not collected: reading the files has already refused references to them.
    """
    secrets = {name: shell[name] for name in references(config) if name in shell}

    def hide(variables: Mapping[str, str]) -> dict[str, str]:
        hidden = {}
        for name, value in variables.items():
            referred = contract.referred_variable(value)
            if referred is not None:
                secrets.update({referred: shell[referred]} if referred in shell else {})
                hidden[name] = value
            elif is_secret(name, value):
                # If the shell has the same value under this name, refer to that variable. Otherwise a file gave the
                # value, which then gets a name that no shell uses.
                key = name if shell.get(name) == value else _key_of(value, secrets)
                secrets[key] = value
                hidden[name] = f"{contract.REFERENCE}{key}"
            else:
                hidden[name] = value
        return hidden

    def hide_argument(argument: str, previous: str) -> str:
        before, secret = _split(argument, previous)
        if not secret:
            return argument
        key = _key_of(secret, secrets)
        secrets[key] = secret
        return f"{before}{contract.REFERENCE}{key}"

    hidden_environment, hidden_rows = hide(environment), [hide(row) for row in rows]
    return Hidden(hidden_environment, hidden_rows, tuple(map(hide_argument, command, ["", *command[:-1]])), secrets)


def references(value: Any) -> list[str]:
    """List the variables that a configuration refers to by `env:NAME`, at any depth, each once, in order."""
    found: dict[str, None] = {}
    _collect(value, found)
    return list(found)


def _collect(value: Any, found: dict[str, None]) -> None:
    if isinstance(value, Mapping):
        for part in value.values():
            _collect(part, found)
    elif isinstance(value, list | tuple):
        for part in value:
            _collect(part, found)
    elif isinstance(value, str):
        name = contract.referred_variable(value)
        if name is not None:
            found[name] = None


def _key_of(value: str, secrets: Mapping[str, str]) -> str:
    """Return the name under which a file's secret is stored: the same for equal values, otherwise the next free one."""
    own = (name for name, known in secrets.items() if known == value and name.startswith(contract.SECRET_PREFIX))
    number = sum(name.startswith(contract.SECRET_PREFIX) for name in secrets)
    return next(own, f"{contract.SECRET_PREFIX}{number}")
