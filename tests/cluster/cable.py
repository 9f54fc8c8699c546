"""A slow cable: carries frames between two network interfaces and holds each back for a fixed time.

A program of its own, `cable.py FROM TO SECONDS`, because few small kernels can delay packets themselves. It says `ready`
once frames flow and ends with its standard input. Frames carry the header of a virtual network card, so that segments
which the sender left for its hardware to cut up and to checksum pass as they are.
"""

import select
import socket
import struct
import sys
import time
from collections import deque

SOL_PACKET, ADD_MEMBERSHIP, VNET_HEADER, IGNORE_OUTGOING, PROMISCUOUS = 263, 1, 15, 23, 1
FORCE_SEND_BUFFER, FORCE_RECEIVE_BUFFER = 32, 33
EVERY_PROTOCOL = 3
LARGEST_FRAME_BYTES = 70_000
BUFFER_BYTES = 64 << 20


class End:
    """One end of the cable: receives at its interface, and sends there what has travelled long enough."""

    def __init__(self, interface):
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        index = socket.if_nametoindex(interface)
        self.socket.setsockopt(SOL_PACKET, VNET_HEADER, 1)
        self.socket.setsockopt(SOL_PACKET, IGNORE_OUTGOING, 1)
        self.socket.setsockopt(SOL_PACKET, ADD_MEMBERSHIP, struct.pack("iHH8s", index, PROMISCUOUS, 0, b""))
        for option in (FORCE_SEND_BUFFER, FORCE_RECEIVE_BUFFER):
            self.socket.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        self.socket.bind((interface, EVERY_PROTOCOL))
        self.socket.setblocking(False)  # noqa: FBT003 - the socket's own signature
        self.underway = deque()

    def take(self, delay_s, *, towards):
        """Put every frame that waits at this end on its way."""
        try:
            while True:
                frame = self.socket.recv(LARGEST_FRAME_BYTES)
                towards.underway.append((time.monotonic() + delay_s, frame))
        except OSError:  # nothing waits, or the interface is down
            return

    def deliver(self):
        """Send what is due; a frame that meets a full queue or a dead interface is lost, as on a real cable."""
        while self.underway and self.underway[0][0] <= time.monotonic():
            frame = self.underway.popleft()[1]
            try:
                self.socket.send(frame)
            except OSError:
                continue


def carry(first, second, *, delay_s):
    waiting = select.epoll()
    for descriptor in (sys.stdin.fileno(), first.socket.fileno(), second.socket.fileno()):
        waiting.register(descriptor, select.EPOLLIN)
    while True:
        due = [end.underway[0][0] for end in (first, second) if end.underway]
        ready = waiting.poll(max(0.0, min(due) - time.monotonic()) if due else -1)
        if any(descriptor == sys.stdin.fileno() for descriptor, _ in ready):
            return
        first.take(delay_s, towards=second)
        second.take(delay_s, towards=first)
        first.deliver()
        second.deliver()


if __name__ == "__main__":
    ends = End(sys.argv[1]), End(sys.argv[2])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    carry(*ends, delay_s=float(sys.argv[3]))
