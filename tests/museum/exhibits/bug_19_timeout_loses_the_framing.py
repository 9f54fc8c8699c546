"""Bug 19: whoever has given up in the middle of a message reads on, and takes the rest of it for the next one."""

from ttlaunch import contract
from ttlaunch.errors import HostError
from ttlaunch.hosts.transport.frames import FrameStream


class Wrong(FrameStream):
    def receive(self, *, timeout_s):
        try:
            return contract.read_frame(lambda size: self.process.read(size, timeout_s=timeout_s))
        except HostError:
            return self.receive(timeout_s=timeout_s)  # the bug: what was read of it is forgotten


STREAM = Wrong
