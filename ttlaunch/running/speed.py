"""The speed of a rank or of a run, as views show it."""

from typing import Protocol

from ttlaunch import contract


class HasSpeed(Protocol):
    """A rank or a run whose speed is measured; at least one of the two numbers is None."""

    @property
    def tokens_per_s(self) -> float | None: ...

    @property
    def samples_per_s(self) -> float | None: ...


def render_speed(measured: HasSpeed) -> str:
    """Render a speed with its unit, such as `1,234 tokens/s`; empty if there is none."""
    for unit in contract.COUNTED:
        if speed := getattr(measured, f"{unit}_per_s"):
            return f"{speed:,.0f} {unit}/s"
    return ""
