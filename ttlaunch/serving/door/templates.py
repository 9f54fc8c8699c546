"""A chat as the text on which its model was trained: the model's own template, rendered in a limited child.

A template is a program of whoever made the model, so nothing that anybody waits for runs it. A few children at a time are
enough; a chat whose texts were rendered a moment ago, for another choice, is not rendered again. One child is started ahead, and
has imported what it needs when the next chat comes.
"""

import asyncio
import contextlib
from collections import OrderedDict
from typing import Final

from ttlaunch.serving.wire import ChatMessage, Hello
from ttlaunch.system_reason import system_reason
from ttlaunch.untrusted.child import Child, UntrustedError

_AT_ONCE: Final = 2
_KEPT: Final = 8
_TASK: Final = "chat"


class Templates:
    """Renders chats for one door."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._kept: OrderedDict[tuple[str, tuple[ChatMessage, ...]], str] = OrderedDict()
        self._ahead: Child | None = None

    def begin(self) -> None:
        """Start the child of the next chat, unless it is there."""
        if self._ahead is None:
            with contextlib.suppress(OSError):  # the chat itself says what is wrong
                self._ahead = Child(_TASK)

    def close(self) -> None:
        """End the child that nobody needs any more."""
        if child := self._take_child():
            child.close()

    async def render(self, hello: Hello, messages: tuple[ChatMessage, ...]) -> str:
        """Return the text that a chat is for the model, up to where its answer begins.

        Raises:
            UntrustedError: The template refuses the chat, is wrong, or reaches a limit.
        """
        key = hello.template_sha256, messages
        async with self._turn:
            if key not in self._kept:
                child = self._take_child()
                try:
                    self._kept[key] = await asyncio.to_thread(render_chat, hello, messages, child)
                finally:
                    self.begin()
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            return self._kept[key]

    def _take_child(self) -> Child | None:
        """Return the child that was started ahead, unless somebody has ended it."""
        child, self._ahead = self._ahead, None
        if child is not None and not child.is_alive:
            child.close()
            return None
        return child


def render_chat(hello: Hello, messages: tuple[ChatMessage, ...], child: Child | None = None) -> str:
    """Render a chat in a limited child, that one or a new one; see `Templates.render`."""
    chat = [{"role": one.role, "content": one.content} for one in messages]
    variables = {"messages": chat, "add_generation_prompt": True, "tools": None, "documents": None}
    request = {"template": hello.chat_template, "variables": {**hello.special_tokens, **variables}}
    try:
        with child or Child(_TASK) as its:
            its.send(request, is_last=True)
            return its.answer().decode()
    except OSError as error:
        raise UntrustedError(f"no process could be started for it: {system_reason(error)}") from error
