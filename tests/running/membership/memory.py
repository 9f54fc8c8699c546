"""A membership in memory, for tests of the service: workers that register are members of the next epoch at once."""

import json
import threading
from dataclasses import replace

from ttlaunch.records.coordinator import Fingerprint
from ttlaunch.records.ranks import StepDone
from ttlaunch.running.membership.answers import Coordinator, Request, answer
from ttlaunch.running.membership.members import Admitted, NotAdmittedError, Order, Orders, Worker

FINGERPRINT = Fingerprint(
    release="5f" * 32,
    recipe="aa" * 32,
    config="bb" * 32,
    corpus="cc" * 32,
    torch="2.13.0+cpu",
    cpu_capability="AVX2",
    threads=1,
)


class MemoryMembers:
    """Keeps its workers in a dictionary, and orders in a list for each."""

    def __init__(self, *, planned=0):
        self.planned = planned
        self.known = {}
        self.messages = {}
        self.records = []
        self.frozen = ""
        self.journal = []
        self._changed = threading.Condition()

    def register(self, number, *, address, name, have_step):
        with self._changed:
            if self.frozen:
                raise NotAdmittedError(self.frozen)
            if number is not None and number < self.planned:
                raise NotAdmittedError(f"the run starts worker-{number:04d} itself")
            if number is None:
                number = max([self.planned - 1, *self.known]) + 1
            before = self.known.get(number)
            incarnation = before.incarnation + 1 if before else 1
            self.known[number] = Worker(
                number, incarnation, None, *address, state="registered", name=name, step=have_step
            )
            self._count_ranks()
            self.journal.append({"epoch": len(self.journal) + 1, "members": sorted(self.known)})
            self._changed.notify_all()
            return Admitted(number, incarnation, self.known[number].rank)

    def leave(self, number):
        with self._changed:
            self.known[number] = replace(self.known[number], left="asked to leave", rank=None)
            self._count_ranks()
            self.tell(number, {"what": "dismiss"})
            return self.known[number].step + 1

    def heartbeat(self, number, beat, records, *, wait_s):
        with self._changed:
            if number not in self.known:
                raise KeyError(number)
            self.records += records
            losses = [record.loss for record in records if isinstance(record, StepDone)]
            step = max([beat.step, *(record.step for record in records if isinstance(record, StepDone))])
            loss = losses[-1] if losses else beat.loss
            self.known[number] = replace(
                self.known[number], step=step, loss=loss, tokens_per_s=beat.tokens_per_s, memory_bytes=beat.rss
            )
            asked = self.known[number].incarnation
            self._changed.wait_for(lambda: self.messages.get(number) or self.known[number].incarnation != asked, wait_s)
            if self.known[number].incarnation != asked:  # orders are for the newer one
                return Orders(len(self.journal), Order.FENCED)
            found = tuple(self.messages.pop(number, ()))
            order = Order.LEAVE if self.known[number].left else Order.PREPARE if found else Order.GO
            return Orders(len(self.journal), order, found)

    def tell(self, number, message):
        with self._changed:
            self.messages.setdefault(number, []).append(message)
            self._changed.notify_all()

    def ready(self):
        return [one for one in self.workers() if not one.left]

    def workers(self):
        return [self.known[number] for number in sorted(self.known)]

    def epochs(self):
        return self.journal

    def _count_ranks(self):
        for rank, number in enumerate(sorted(number for number, one in self.known.items() if not one.left)):
            self.known[number] = replace(self.known[number], rank=rank)


class NoAuthority:
    """An authority whose certificates prove nothing, for tests without TLS."""

    certificate = "the certificate of the authority"

    def sign(self, request, name):
        if "REQUEST" not in request:
            raise ValueError("it is no request")
        return f"a certificate for {name}"


def coordinator_in_memory(*, planned=0, authority=None, fingerprint=FINGERPRINT):
    """A coordinator of a run without ranks; `planned` numbers are those of ranks that the run would start itself."""
    return Coordinator(
        MemoryMembers(planned=planned),
        run={
            "run_id": "2026-08-23T10-14-07",
            "recipe": "data_parallel",
            "layout": "workers",
            "role": "worker",
            "config": "training_config: {steps: 5}\n",
            "elastic": {"minimum": 1, "maximum": 4, "micro_batches": 4, "first": 0},
            "url": "https://10.0.0.1:7000#ab",
        },
        fingerprint=lambda: fingerprint,
        authority=authority or NoAuthority(),
    )


def ask(coordinator, method, target, body=b"", *, token=None, owner=False, now=0.0):
    """The status and the JSON of one answer; `body` may be what is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = answer(Request(method, target, data, token, owner, now), coordinator)
    return found.status, found.content


def invited(coordinator, *, valid_s=60.0, now=0.0):
    """A new token by which one worker may register."""
    status, content = ask(coordinator, "POST", "/invitations", {"valid_s": valid_s}, owner=True, now=now)
    assert status == 200, content
    return content["token"]


def registration(number=None, *, fingerprint=FINGERPRINT, **more):
    """The body of a registration."""
    worker_id = None if number is None else f"worker-{number:04d}"
    address = {"ip_address": f"10.0.0.{(number or 0) + 10}", "port": 50051 + (number or 0)}
    return {"worker_id": worker_id, **address, "fingerprint": vars(fingerprint), "have_step": 0, **more}


def join(coordinator, number=None, **more):
    """Register a worker with a token of its own; returns the answer."""
    status, content = ask(
        coordinator, "POST", "/workers/register", registration(number, **more), token=invited(coordinator)
    )
    assert status == 200, content
    return content
