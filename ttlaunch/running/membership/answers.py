"""Answer the requests to a run's coordinator: a pure table of verbs, without a socket or a clock.

    GET    /training/ready?min_workers=N   whether so many workers are members, and where each listens
    GET    /run                            what a worker must have in common with the run
    GET    /workers, /workers/ID           how far each worker is
    GET    /epochs                         the journal of the membership
    POST   /workers/register               take part
    POST   /workers/ID/heartbeat           report progress, receive orders
    DELETE /workers/ID                     leave at the next boundary
    GET    /authority                      the certificate of the run's authority; needs no token
    POST   /invitations                    make a token; for the owner of the run, as the next two
    GET    /invitations
    DELETE /invitations/ID

All other requests than that for `/authority` need a token. An invitation's registers one worker, and reads; a worker's token reports,
leaves, registers that worker again, and reads. The owner, who is known by the kernel, needs none.
"""

import ipaddress
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl

from ttlaunch import contract
from ttlaunch.diagnostics.suggest import did_you_mean, shown
from ttlaunch.records import coordinator as bodies
from ttlaunch.records.parser import BadRecord
from ttlaunch.records.ranks import AnyProgress, read_progress
from ttlaunch.running.membership.fingerprints import differences
from ttlaunch.running.membership.members import (
    LONGEST_WAIT_S,
    Admitted,
    Members,
    NotAdmittedError,
    Order,
    Orders,
    Worker,
)
from ttlaunch.running.membership.tokens import Invitation, Tokens, WorkerToken

T = TypeVar("T")
Json = dict[str, Any]
HEARTBEAT_S = 1.0
_MOST_PARAMETERS = 10
_WORKER = re.compile(r"worker-([0-9]{4})\Z")


@dataclass(frozen=True)
class Request:
    """A request to the coordinator.

    Attributes:
        target: The path and the query.
        token: The bearer token; None without one.
        is_owner: Whether the caller is the run's owner on this machine.
        now: The time on the clock of the tokens.
    """

    method: str
    target: str
    body: bytes = b""
    token: str | None = None
    is_owner: bool = False
    now: float = 0.0


@dataclass(frozen=True)
class Answer:
    """What a request is answered with: an HTTP status, a JSON value, and further headers."""

    status: int
    content: Json
    headers: Mapping[str, str] = field(default_factory=dict)


class SignsRequests(Protocol):
    """The authority of a run, as far as the coordinator needs it."""

    @property
    def certificate(self) -> str:
        """Its own certificate, as PEM."""

    def sign(self, request: str, name: str) -> str:
        """Return a certificate (PEM) for the key of a request and for `name` alone.

        Raises:
            ValueError: This is no request, or its signature is wrong.
        """


@dataclass
class Coordinator:
    """What requests are answered from.

    Attributes:
        members: The membership of the run.
        run: What a joiner must know of the run besides its fingerprint: the answer to `GET /run`.
        fingerprint: Returns the fingerprint of the run's own machine; it may take seconds the first time.
        authority: Signs the certificates of workers.
    """

    members: Members
    run: Json
    fingerprint: Callable[[], bodies.Fingerprint]
    authority: SignsRequests
    lease_s: float = contract.LEASE_S
    tokens: Tokens = field(default_factory=Tokens)
    fenced: dict[int, int] = field(default_factory=dict)  # by worker, how many messages of older incarnations came
    lock: threading.Lock = field(default_factory=threading.Lock)  # of tokens and `fenced`


class _RefusedError(Exception):
    def __init__(self, status: int, text: str, **more: Any) -> None:
        super().__init__(text)
        self.answer = Answer(status, {"error": text, **more})


def answer(request: Request, coordinator: Coordinator) -> Answer:
    """Answer a request; never raises for anything that a caller can send."""
    try:
        return _answer(request, coordinator)
    except _RefusedError as refused:
        return refused.answer


@dataclass(frozen=True)
class _Call:
    """A request of a known caller, and the part of its path that names a worker or an invitation."""

    request: Request
    caller: Invitation | WorkerToken | None  # None is the owner
    to: Coordinator
    query: str
    name: str

    @property
    def number(self) -> int:
        """The number of the worker that the path names."""
        return _number(self.name)


def _answer(request: Request, to: Coordinator) -> Answer:
    path, _, query = request.target.partition("?")
    if path == "/authority" and request.method == "GET":
        return Answer(200, {"authority": to.authority.certificate})
    with to.lock:
        caller = _caller(request, to.tokens)
    found = next(((match, verbs) for route, verbs in _ROUTES if (match := re.fullmatch(route, path))), None)
    if found is None:
        raise _RefusedError(404, f"there is no `{shown(path)}`")
    match, verbs = found
    if request.method not in verbs:
        allowed = ", ".join(verbs)
        text = f"`{shown(path)}` takes {allowed}, not {shown(request.method)}"
        return Answer(405, {"error": text}, {"Allow": allowed})
    return verbs[request.method](_Call(request, caller, to, query, "".join(match.groups())))


def _caller(request: Request, tokens: Tokens) -> Invitation | WorkerToken | None:
    """Return who calls; None for the owner. A used or expired invitation is refused here, for reading too."""
    if request.is_owner:
        return None
    found = tokens.find(request.token) if request.token else None
    problem = found.problem(request.now) if isinstance(found, Invitation) else ""
    if found is None or problem:
        text = problem or ("this token is unknown" if request.token else "a bearer token is needed")
        raise _RefusedError(401, text)
    return found


# Reading


def _ready(call: _Call) -> Answer:
    try:
        values = dict(parse_qsl(call.query, keep_blank_values=True, max_num_fields=_MOST_PARAMETERS))
    except ValueError:
        raise _RefusedError(422, "there are too many parameters, expected `min_workers`") from None
    given = values.pop("min_workers", "")
    if values:
        name = next(iter(values))
        raise _RefusedError(422, f"unknown parameter `{shown(name)}`", hints=list(did_you_mean(name, ["min_workers"])))
    if not re.fullmatch(r"[0-9]{1,9}", given, re.ASCII) or int(given) < 1:
        raise _RefusedError(422, f"`min_workers` is {shown(given)!r}, expected a number from 1")
    return Answer(200, ready_json(call.to.members.ready(), int(given)))


def ready_json(members: Sequence[Worker], least: int) -> Json:
    """Return the answer to `GET /training/ready`: ranks are the positions of the members in the order of their names."""
    rows = sorted(members, key=lambda one: one.number)
    return {
        "ready": len(rows) >= least,
        "active_workers": len(rows),
        "min_workers": least,
        "workers": [
            {
                "worker_id": contract.worker_name(one.number),
                "ip_address": one.ip_address,
                "port": one.port,
                "rank": rank,
            }
            for rank, one in enumerate(rows)
        ],
    }


def worker_json(one: Worker, to: Coordinator) -> Json:
    """Return how far a worker is, for `GET /workers`."""
    return {
        "worker_id": contract.worker_name(one.number),
        "name": one.name,
        "rank": one.rank,
        "incarnation": one.incarnation,
        "ip_address": one.ip_address,
        "port": one.port,
        "state": one.state,
        "step": one.step,
        "loss": _finite(one.loss),
        "tokens_per_s": _finite(one.tokens_per_s),
        "memory_bytes": one.memory_bytes,
        "since": one.since,
        "last_progress_s": one.last_progress_s,
        "left": one.left,
        "fenced_messages": to.fenced.get(one.number, 0),
    }


def _finite(value: float | None) -> float | str | None:
    """Return a number as `contract.record_line` writes it: JSON has no NaN."""
    return value if value is None or math.isfinite(value) else str(value)


def _run(call: _Call) -> Answer:
    return Answer(200, {**call.to.run, "fingerprint": vars(call.to.fingerprint())})


def _workers(call: _Call) -> Answer:
    return Answer(200, {"workers": [worker_json(one, call.to) for one in call.to.members.workers()]})


def _worker(call: _Call) -> Answer:
    for one in call.to.members.workers():
        if one.number == call.number:
            return Answer(200, worker_json(one, call.to))
    raise _unknown(call)


def _epochs(call: _Call) -> Answer:
    return Answer(200, {"epochs": list(call.to.members.epochs())})


# Taking part


def _register(call: _Call) -> Answer:
    request, caller, to = call.request, call.caller, call.to
    if caller is None:
        raise _RefusedError(403, "the owner of the run invites workers; a worker registers with its token")
    body = _body(bodies.Registration, request)
    _check_address(body.ip_address)
    number = None if body.worker_id is None else _number(body.worker_id)
    if isinstance(caller, WorkerToken):
        _check_own(caller, number, to)
    elif number is not None and any(one.number == number and not one.left for one in to.members.workers()):
        # Else whoever has an invitation could fence a worker of somebody else.
        raise _RefusedError(409, f"{contract.worker_name(number)} takes part; only its own token registers it again")
    found = differences(to.fingerprint(), body.fingerprint)
    if found:
        text = f"this worker differs from the run in {', '.join(one.field for one in found)}"
        raise _RefusedError(409, text, differences=[vars(one) for one in found])
    with to.lock:
        # Checked again: two may register with one token at the same time.
        _caller(request, to.tokens)
        admitted = _admit(body, number, to)
        if isinstance(caller, Invitation):
            caller.used_by = admitted.number
        token = to.tokens.give(admitted.number, admitted.incarnation)
    content = {
        "worker_id": contract.worker_name(admitted.number),
        "incarnation": admitted.incarnation,
        "rank": admitted.rank,
        "run_id": to.run["run_id"],
        "lease_s": to.lease_s,
        "heartbeat_s": HEARTBEAT_S,
        "token": token,
    }
    if body.certificate_request is not None:
        content["certificate"] = to.authority.sign(body.certificate_request, contract.peer_name(admitted.number))
    return Answer(200, content)


def _admit(body: bodies.Registration, number: int | None, to: Coordinator) -> Admitted:
    if body.certificate_request is not None:
        try:
            to.authority.sign(body.certificate_request, "check")  # before the run knows of the worker
        except ValueError as error:
            raise _RefusedError(422, f"`certificate_request` cannot be used: {error}") from None
    try:
        return to.members.register(
            number, address=(body.ip_address, body.port), name=body.name, have_step=body.have_step
        )
    except NotAdmittedError as error:
        raise _RefusedError(409, str(error)) from None


def _check_address(text: str) -> None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise _RefusedError(422, f"`ip_address` is {shown(text)!r}, expected an IP address") from None
    if address.is_unspecified or address.is_multicast:
        raise _RefusedError(422, f"`ip_address` is {address}, at which no other worker can reach this one")


def _check_own(caller: WorkerToken, number: int | None, to: Coordinator) -> None:
    """Refuse a worker that names another worker's number, or is an older incarnation."""
    if number != caller.number:
        raise _RefusedError(403, f"this token is that of {contract.worker_name(caller.number)}")
    if caller.incarnation != to.tokens.newest[caller.number]:
        raise _RefusedError(409, f"a newer incarnation of {contract.worker_name(caller.number)} has registered")


def _heartbeat(call: _Call) -> Answer:
    request, caller, to, number = call.request, call.caller, call.to, call.number
    if not isinstance(caller, WorkerToken) or caller.number != number:
        raise _RefusedError(403, f"only {contract.worker_name(number)} reports for itself")
    body = _body(bodies.Heartbeat, request)
    with to.lock:
        if caller.incarnation != to.tokens.newest[number]:
            to.fenced[number] = to.fenced.get(number, 0) + 1
            return Answer(200, _orders_json(Orders(body.epoch, Order.FENCED)))
    if body.incarnation != caller.incarnation:
        raise _RefusedError(403, f"this token is that of incarnation {caller.incarnation}, not {body.incarnation}")
    records = [_record(index, line) for index, line in enumerate(body.records)]
    try:
        orders = to.members.heartbeat(number, body, records, wait_s=min(body.wait_s, LONGEST_WAIT_S))
    except KeyError:
        raise _unknown(call) from None
    return Answer(200, _orders_json(orders))


def _orders_json(orders: Orders) -> Json:
    return {"epoch": orders.epoch, "order": str(orders.order), "messages": [dict(one) for one in orders.messages]}


def _record(index: int, line: str) -> AnyProgress:
    found = read_progress(line.encode())
    if isinstance(found, BadRecord):
        raise _RefusedError(422, f"record {index} cannot be used: {found.reason}")
    return found


def _leave(call: _Call) -> Answer:
    caller, to, number = call.caller, call.to, call.number
    if caller is not None:
        if not isinstance(caller, WorkerToken) or caller.number != number:
            name = contract.worker_name(number)
            raise _RefusedError(403, f"only {name} and the owner of the run can end its part")
        _check_own(caller, number, to)
    try:
        return Answer(200, {"leaves_after_step": to.members.leave(number)})
    except KeyError:
        raise _unknown(call) from None
    except NotAdmittedError as error:
        raise _RefusedError(409, str(error)) from None


# Inviting


def _invitations(call: _Call) -> Answer:
    _check_owner(call)
    with call.to.lock:
        return Answer(200, {"invitations": call.to.tokens.invitations(call.request.now)})


def _invite(call: _Call) -> Answer:
    _check_owner(call)
    body = _body(bodies.Invitation, call.request)
    with call.to.lock:
        try:
            made, token = call.to.tokens.invite(body.valid_s, call.request.now)
        except ValueError as error:
            raise _RefusedError(422, f"`valid_s` is {body.valid_s:g}: {error}") from None
    return Answer(200, {"id": made.id, "token": token, "expires_in_s": body.valid_s, "url": call.to.run.get("url")})


def _revoke(call: _Call) -> Answer:
    _check_owner(call)
    with call.to.lock:
        found = call.to.tokens.revoke(call.name)
        known = [str(one["id"]) for one in call.to.tokens.invitations(call.request.now)]
    if found is None:
        text = f"no invitation has the id `{shown(call.name)}`"
        raise _RefusedError(404, text, hints=list(did_you_mean(call.name, known)))
    return Answer(200, {"id": found.id, "used_by": found.used_by})


def _check_owner(call: _Call) -> None:
    if not call.request.is_owner:
        raise _RefusedError(403, "only the owner of the run invites workers")


def _body(cls: type[T], request: Request) -> T:
    found = bodies.read_body(cls, request.body)
    if isinstance(found, bodies.UnknownField):
        text = f"unknown field `{shown(found.path + found.name)}`"
        raise _RefusedError(422, text, hints=list(did_you_mean(found.name, sorted(found.known))))
    if isinstance(found, BadRecord):
        raise _RefusedError(422, f"the body cannot be used: {found.reason}")
    return found


def _number(name: str) -> int:
    found = _WORKER.match(name)
    if found is None:
        raise _RefusedError(422, f"`{shown(name)}` is no worker, expected a name such as `{contract.worker_name(3)}`")
    return int(found[1])


def _unknown(call: _Call) -> _RefusedError:
    known = [contract.worker_name(one.number) for one in call.to.members.workers()]
    return _RefusedError(404, f"there is no {shown(call.name)}", hints=list(did_you_mean(call.name, known)))


_ROUTES: list[tuple[str, dict[str, Callable[[_Call], Answer]]]] = [
    (r"/training/ready", {"GET": _ready}),
    (r"/run", {"GET": _run}),
    (r"/epochs", {"GET": _epochs}),
    (r"/workers", {"GET": _workers}),
    (r"/workers/register", {"POST": _register}),
    (r"/workers/([^/]+)", {"GET": _worker, "DELETE": _leave}),
    (r"/workers/([^/]+)/heartbeat", {"POST": _heartbeat}),
    (r"/invitations", {"GET": _invitations, "POST": _invite}),
    (r"/invitations/([^/]+)", {"DELETE": _revoke}),
]
