"""Bug 26: two chats share one socket, and whatever arrives goes to the one that asked last.

There it was one global socket between the web server and the ranks: a second question, asked while the first was still being answered, took the
first one's tokens.
"""

from dataclasses import replace

from ttlaunch.serving.door.link import Link


class Wrong(Link):
    def _take(self, message, writer):
        if hasattr(message, "stream"):
            message = replace(message, stream=max(self._streams, default=message.stream))  # the bug
        super()._take(message, writer)


LINK = Wrong
