"""Render a chat template: a program in Jinja, which came with a model, over the messages of a chat.

The sandbox of Jinja keeps a template from Python, but not from loops without end or texts without limit; the limits of the
child do. Everything that Jinja imports late is imported here, because a limited child can open nothing.

Source: transformers, `utils/chat_template_utils.py`, for what templates may expect.
"""

from __future__ import annotations

import json
import pprint
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

import jinja2
import jinja2.constants
import jinja2.debug
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ttlaunch.untrusted.child import UntrustedError

_LATE = (pprint, jinja2.constants, jinja2.debug)
_LONGEST_REASON = 300
time.localtime()  # reads the file of the time zone
b"a".decode("unicode_escape")  # imports what reads the texts in a template


class _Generation(Extension):
    """`{% generation %}` marks what a model has said; the text is the same without the mark."""

    tags = {"generation"}  # noqa: RUF012 - the class of Jinja has it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def answers(requests: Iterator[dict[str, Any]], _: BinaryIO) -> Iterator[bytes]:
    """Answer `{"template": text, "variables": {name: value}}` with the text that the template makes of the variables.

    Without variables the template is only read, and the answer is empty.
    """
    for request in requests:
        yield _render(request["template"], request.get("variables")).encode()


def _render(template: str, variables: dict[str, Any] | None) -> str:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        read = environment.from_string(template)
        text = "" if variables is None else read.render(**variables)
        text.encode()
    except (MemoryError, RecursionError, UntrustedError):
        raise
    except UnicodeEncodeError:
        raise UntrustedError("it makes half of a surrogate pair") from None
    except Exception as error:  # a template may raise anything
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise UntrustedError(f"{line}{kind}{str(error)[:_LONGEST_REASON]}") from error
    return text


def _to_json(value: Any, **options: Any) -> str:
    known: dict[str, Any] = {name: options.get(name) for name in ("indent", "separators")}
    return json.dumps(
        value, ensure_ascii=options.get("ensure_ascii", False), sort_keys=options.get("sort_keys", False), **known
    )


def _refuse(message: Any) -> NoReturn:
    raise UntrustedError(f"it says: {str(message)[:_LONGEST_REASON]}")


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - the user's time, as transformers has it
