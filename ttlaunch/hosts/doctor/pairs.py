"""Let every host connect to every other over the chosen network, in both directions, and judge the results."""

import contextlib
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from ttlaunch.errors import HostError, Trouble
from ttlaunch.hosts.transport.fleet import on_each
from ttlaunch.hosts.transport.frames import FrameStream
from ttlaunch.hosts.transport.pushed import Interpreter, explain_end
from ttlaunch.hosts.transport.transport import Transport
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.host_scripts import Listening, Measured, Reached

START_S = 5.0
REACH_S, LONGEST_REACH_S = 3.0, 15.0
MEASURE_S = 0.5
_MARGIN_S = 3.0


@dataclass(frozen=True)
class Pair:
    """The result of one host's attempt to connect to another.

    Attributes:
        seconds: The seconds until the other host accepted the connection; None if it did not.
        latency_s: The median round trip of one byte; None if it was not measured.
        bytes_per_s: The bandwidth towards `target`; None if it was not measured.
        problem: What went wrong; None if nothing did.
    """

    source: str
    target: str
    seconds: float | None
    problem: str | None = None
    latency_s: float | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class Pairs:
    """The results of all ordered pairs of the hosts that took part.

    Attributes:
        errors: The reason for each host that did not take part.
    """

    pairs: list[Pair] = field(default_factory=list)
    errors: dict[str, HostError] = field(default_factory=dict)


def measure_pairs(
    transports: Sequence[Transport],
    addresses: Mapping[str, str],
    *,
    pythons: Mapping[str, Sequence[str]] | None = None,
    interpreters: Mapping[str, Interpreter] | None = None,
    bandwidth: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Pairs:
    """Let all hosts connect to all others at the same time; with `bandwidth`, measure each pair afterwards.

    No host takes part in two measurements at the same time.

    Args:
        transports: The hosts; connected.
        addresses: The address of each host on the chosen network; hosts without one do not take part.
        pythons: Interpreters to try first for our script, by host.
        interpreters: A running Python of each host, which goes on afterwards; None to start one on each.
        bandwidth: Whether to measure latency and bandwidth. This takes about a second for each host: disjoint pairs are measured
            in one round, a round takes a second, and n hosts need n - 1 rounds, or n if n is odd.
        progress: Called before each round of measurements, with the number of rounds done and the number of all rounds.
    """
    scripts = _PairScripts(addresses, pythons or {}, interpreters)
    try:
        scripts.listen([transport for transport in transports if transport.host in addresses])
        scripts.reach()
        if bandwidth:
            scripts.measure(progress or _ignore)
    finally:
        scripts.close()
    order = {host: number for number, host in enumerate(addresses)}
    pairs = sorted(scripts.pairs.values(), key=lambda pair: (order[pair.source], order[pair.target]))
    return Pairs(pairs, scripts.errors)


def _ignore(_done: int, _total: int) -> None:
    """Drop the progress."""


class _PairScripts:
    """The scripts that we run on all hosts, with which the hosts connect to each other."""

    def __init__(
        self,
        addresses: Mapping[str, str],
        pythons: Mapping[str, Sequence[str]],
        interpreters: Mapping[str, Interpreter] | None,
    ) -> None:
        self.errors: dict[str, HostError] = {}
        self.pairs: dict[tuple[str, str], Pair] = {}
        self._addresses = addresses
        self._pythons = pythons
        self._interpreters = interpreters
        self._token = secrets.token_hex(32)
        self._ready: list[Transport] = []
        self._streams: dict[str, FrameStream] = {}
        self._peers: dict[str, tuple[str, str, int]] = {}

    def listen(self, transports: Sequence[Transport]) -> None:
        """Start a script on each host, which opens a port."""
        for transport, answer in on_each(
            transports, self._listen, timeout_s=START_S, most_at_once=_all_at_once(transports)
        ):
            host = transport.host
            if isinstance(answer, HostError):
                self.errors[host] = answer
                continue
            self._streams[host], port = answer
            self._peers[host] = (host, self._addresses[host], port)
            self._ready.append(transport)

    def reach(self) -> None:
        """Let all hosts connect to all others, at the same time."""
        deadline = LONGEST_REACH_S + _MARGIN_S
        for transport, answer in on_each(
            self._ready, self._reach, timeout_s=deadline, most_at_once=_all_at_once(self._ready)
        ):
            if isinstance(answer, HostError):
                self.errors[transport.host] = answer
            else:
                self.pairs |= {(pair.source, pair.target): pair for pair in answer}

    def measure(self, progress: Callable[[int, int], None]) -> None:
        """Measure every pair that got through, both ways, so that no host takes part in two measurements at once."""
        rounds = plan_rounds([transport.host for transport in self._ready])
        for done, matches in enumerate(rounds):
            progress(done, len(rounds))
            threads = [threading.Thread(target=self._measure_both, args=match, daemon=True) for match in matches]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def close(self) -> None:
        for host, stream in self._streams.items():
            if self._interpreters is None or host in self.errors:
                stream.process.kill()
                continue
            with contextlib.suppress(HostError):  # whoever uses the interpreter next will notice
                stream.send({"kind": "end"}, timeout_s=_MARGIN_S)

    def _listen(self, transport: Transport) -> tuple[FrameStream, int]:
        arguments: dict[str, Any] = {
            "name": transport.host,
            "address": self._addresses[transport.host],
            "token": self._token,
            "timeout_s": REACH_S,
            "longest_s": LONGEST_REACH_S,
        }
        pythons = self._pythons.get(transport.host, ())
        python = (self._interpreters or {}).get(transport.host) or Interpreter(transport)
        try:
            stream = python.start(
                "pairs",
                arguments=arguments,
                pythons=pythons,
                is_last=self._interpreters is None,
                timeout_s=START_S,
            )
            return stream, _port(stream, arguments["address"])
        except HostError:
            python.drop()
            raise

    def _reach(self, transport: Transport) -> list[Pair]:
        host = transport.host
        stream = self._streams[host]
        asked = {name: peer for name, peer in self._peers.items() if name != host}
        stream.send({"kind": "reach", "peers": list(asked.values())}, timeout_s=REACH_S)
        answer = stream.answer(Reached, timeout_s=LONGEST_REACH_S + _MARGIN_S)
        return [Pair(host, target, seconds, problem) for target, seconds, problem in answer.results if target in asked]

    def _measure_both(self, one: str, other: str) -> None:
        for source, target in ((one, other), (other, one)):
            pair = self.pairs.get((source, target))
            if pair is None or pair.problem is not None:
                continue
            try:
                stream = self._streams[source]
                order = {"kind": "measure", "peer": self._peers[target], "seconds": MEASURE_S}
                stream.send(order, timeout_s=REACH_S)
                answer = stream.answer(Measured, timeout_s=MEASURE_S + 2 * _MARGIN_S)
            except HostError as error:
                self.errors.setdefault(source, error)
                return
            self.pairs[source, target] = replace(
                pair,
                latency_s=answer.latency_s,
                bytes_per_s=answer.bytes_per_s,
                problem=answer.problem,
            )


def _port(stream: FrameStream, address: str) -> int:
    """The port on which our script on a host listens."""
    frame = stream.receive(timeout_s=START_S)
    if frame is None:
        raise explain_end(stream, timeout_s=1.0) or HostError(stream.host, Trouble.SCRIPT, "our script ended")
    answer = stream.checked(Listening, frame[0])
    if answer.problem is not None or answer.port is None:
        raise HostError(stream.host, Trouble.SCRIPT, f"no port can be opened at {address}: {answer.problem}")
    return answer.port


def plan_rounds(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Rounds of disjoint pairs that together contain each pair once: a round-robin tournament.

    >>> plan_rounds(["a", "b", "c", "d"])
    [[('a', 'd'), ('b', 'c')], [('a', 'c'), ('d', 'b')], [('a', 'b'), ('c', 'd')]]
    """
    seats: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        matches = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(one, other) for one, other in matches if one is not None and other is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _all_at_once(transports: Sequence[Transport]) -> int:
    """The number of hosts to use at once: all, because they connect to each other, and none may wait for its turn."""
    return max(1, len(transports))
