"""Tell `ttlaunch run -- any command` from `ttlaunch run RECIPE`: what stands after `--` is a command, as it was typed."""

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

_WORDS = "ttlaunch.words_after_dashes"


class CommandAfterDashes(TyperCommand):
    """A command that remembers how many words followed `--`; the parser itself forgets it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Note the number, then parse as usual."""
        ctx.meta[_WORDS] = len(args) - args.index("--") - 1 if "--" in args else 0
        return super().parse_args(ctx, args)


def is_command(ctx: Any, target: str, arguments: Sequence[str]) -> bool:
    """Whether the target itself stood after `--`."""
    return bool(ctx.meta.get(_WORDS, 0) >= len([target, *arguments]))
