"""`--audit 1/K`: which recipes let their ranks check each other's gradients, and what that costs."""

import re
from collections.abc import Iterator
from dataclasses import replace

from ttlaunch.diagnostics import Blame, Diagnostic, shown, usage_mistake
from ttlaunch.diagnostics.suggest import listed
from ttlaunch.planning.roles import RoleLayout
from ttlaunch.spec.recipe.config import LoadedConfig, override_config, value_of
from ttlaunch.spec.recipe.declare import Recipe, audit_interval
from ttlaunch.spec.recipe.traffic import AUDIT_BYTES

OPTION = "--audit"
_KEY = "training_config.audit_interval"
_SHARE = re.compile(r"1/([1-9][0-9]{0,8})")
_EXAMPLE = "`--audit 1/50` audits every 50th step"


def parse_share(text: str) -> int | Diagnostic:
    """Read the value of `--audit`, and return the steps between audits; a diagnostic if it is none."""
    found = _SHARE.fullmatch(text)
    return int(found[1]) if found else usage_mistake(f"`{OPTION} {shown(text)}` is not 1/K", _EXAMPLE)


def with_audits(recipe: Recipe, loaded: LoadedConfig, share: str | None) -> LoadedConfig:
    """Return the configuration with the audits that `--audit` asks for, and with what is wrong with its value."""
    if share is None or loaded.config is None:
        return loaded
    interval = parse_share(share)
    if isinstance(interval, Diagnostic):
        return replace(loaded, diagnostics=(*loaded.diagnostics, interval))
    return override_config(recipe, loaded, [f"{_KEY}={interval}"], option=OPTION)


def check_audits(name: str, recipe: Recipe, loaded: LoadedConfig, *, layout: RoleLayout) -> Iterator[Diagnostic]:
    """Report why the ranks of a recipe cannot check each other's gradients; nothing if they can, or if nobody asks for it.

    Args:
        name: The recipe's name.
        recipe: Its declaration.
        loaded: Its configuration.
        layout: The role of each rank.
    """
    if audit_interval(loaded.config) is None:
        return
    form = recipe.audited
    if form is None:
        yield _mistake(f"`{OPTION}` lets ranks check each other's gradients, and those of {name} cannot", loaded)
        return
    for key, value in form.only.items():
        values = value if isinstance(value, tuple) else (value,)
        if value_of(loaded, key) not in values:
            yield _wrong_value(name, key, loaded, role=form.role, values=values)
    count = sum(role == form.role for role in layout.roles)
    if count < 2:  # noqa: PLR2004 - one computes, another one compares
        yield _mistake("an audit needs two ranks that differentiate, and this run has one", loaded)


def cost_of_audits(interval: int) -> str:
    """Say what audits cost."""
    share = 100 / interval
    return (
        f"in every {_ordinal(interval)} step each worker also computes the micro-batches of another one, which takes "
        f"about {share:.3g} % of the time of all steps, and sends {AUDIT_BYTES} bytes to each other worker"
    )


def _ordinal(number: int) -> str:
    if number == 1:
        return "single"
    teen = number // 10 % 10 == 1
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def _wrong_value(name: str, key: str, loaded: LoadedConfig, *, role: str, values: tuple[object, ...]) -> Diagnostic:
    texts = [_yaml(value) for value in values]
    message = (
        f"`{key}` is `{_yaml(value_of(loaded, key))}`; ranks of {name} can check each other's gradients only with "
        f"{listed(texts)}"
    )
    label = loaded.label(key, f"expected {listed(texts)}") or loaded.label(
        _KEY, f"every {role} would check another one"
    )
    hint = f"`--set {key}={texts[0]}`, or leave `{OPTION}` out"
    return Diagnostic("P089", message, label, hints=(hint,), blame=_blame(loaded))


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _mistake(message: str, loaded: LoadedConfig) -> Diagnostic:
    hint = f"leave `{OPTION}` out, or set `{_KEY}` to null"
    return Diagnostic("P089", message, loaded.label(_KEY), hints=(hint,), blame=_blame(loaded))


def _blame(loaded: LoadedConfig) -> Blame:
    return Blame.COMMAND_LINE if loaded.origin(_KEY).startswith("--") else Blame.DESCRIPTION
