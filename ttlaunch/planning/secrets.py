"""Keep secrets out of everything that is written or shown: a plan names them, and their values travel beside it.

In the training configuration and in environments, the value `env:NAME` stands for the launching shell's variable `NAME`.
An environment variable whose name marks a secret (`HF_TOKEN`, `WANDB_API_KEY`) is hidden too, even if a file gives its
value literally. Ranks find the values in their environment; see `agent/shim.py` and `runtime/entry.py`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ttlaunch import contract

_SECRET_NAME = re.compile(
    r"(?:\A|_)(?:API_?KEY|ACCESS_KEY|PRIVATE_KEY|SECRET_KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)\Z",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Hidden:
    """Environments with references in place of secret values.

    Attributes:
        environment: The variables that all ranks share.
        rows: Each rank's own variables.
        secrets: The value of each variable that a reference names.
    """

    environment: Mapping[str, str]
    rows: Sequence[Mapping[str, str]]
    secrets: Mapping[str, str] = field(repr=False)


def hide_secrets(
    environment: Mapping[str, str],
    rows: Sequence[Mapping[str, str]],
    config: Any,
    *,
    shell: Mapping[str, str],
) -> Hidden:
    """Take secret values out of environments, and collect those that environments and configuration refer to.

    `secrets` leaves out variables that the shell lacks: reading the files has already refused references to them.
    """
    secrets = {name: shell[name] for name in references(config) if name in shell}

    def hide(variables: Mapping[str, str]) -> dict[str, str]:
        hidden = {}
        for name, value in variables.items():
            referred = contract.referred_variable(value)
            if referred is not None:
                secrets.update({referred: shell[referred]} if referred in shell else {})
                hidden[name] = value
            elif _SECRET_NAME.search(name) and value:
                # If the shell has the same value under this name, refer to that variable. Otherwise a file gave the
                # value, which then gets a name that no shell uses.
                key = name if shell.get(name) == value else _key_of(value, secrets)
                secrets[key] = value
                hidden[name] = f"{contract.REFERENCE}{key}"
            else:
                hidden[name] = value
        return hidden

    hidden_environment = hide(environment)
    return Hidden(hidden_environment, [hide(row) for row in rows], secrets)


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
