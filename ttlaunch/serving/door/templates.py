"""A chat as the text on which its model was trained: the model's own template, rendered in a limited child.

A template is a program of whoever made the model, so nothing that anybody waits for runs it. A few children at a time are
enough; a chat whose texts were rendered a moment ago, for another choice, is not rendered again.
"""

import asyncio
from collections import OrderedDict
from typing import Final

from ttlaunch.serving.wire import ChatMessage, Hello
from ttlaunch.untrusted.child import UntrustedError, read_limited

_AT_ONCE: Final = 2
_KEPT: Final = 8


class Templates:
    """Renders chats for one door."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._kept: OrderedDict[tuple[str, tuple[ChatMessage, ...]], str] = OrderedDict()

    async def render(self, hello: Hello, messages: tuple[ChatMessage, ...]) -> str:
        """Return the text that a chat is for the model, up to where its answer begins.

        Raises:
            UntrustedError: The template refuses the chat, is wrong, or reaches a limit.
        """
        key = hello.template_sha256, messages
        async with self._turn:
            if key not in self._kept:
                self._kept[key] = await asyncio.to_thread(render_chat, hello, messages)
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            return self._kept[key]


def render_chat(hello: Hello, messages: tuple[ChatMessage, ...]) -> str:
    """Render a chat in a limited child; see `Templates.render`."""
    chat = [{"role": one.role, "content": one.content} for one in messages]
    variables = {"messages": chat, "add_generation_prompt": True, "tools": None, "documents": None}
    request = {"template": hello.chat_template, "variables": {**hello.special_tokens, **variables}}
    try:
        return read_limited("chat", request).decode()
    except OSError as error:
        raise UntrustedError(f"no process could be started for it: {error.strerror}") from error
