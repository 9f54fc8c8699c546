"""Join a run from this machine with one worker: check that this machine has the run's bits, register, and take part until the end."""

import ipaddress
import json
import re
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from ttlaunch import contract
from ttlaunch.agent.held_port import hold_port
from ttlaunch.app.coordinator_problems import INVITES, different, no_answer, refused
from ttlaunch.app.dialogue import Dialogue
from ttlaunch.app.joined_worker import run_worker
from ttlaunch.app.outcome import Outcome
from ttlaunch.app.signals import handled
from ttlaunch.app.worker_plan import numbered, plan_worker
from ttlaunch.diagnostics import Blame, Diagnostic, LaunchError, shown, usage_error
from ttlaunch.planning.launch_plan import LaunchPlan
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.records.coordinator import Fingerprint, RunDescription, Welcome
from ttlaunch.running.agents.certificates import make_request
from ttlaunch.running.membership.client import (
    ANSWER_S,
    CoordinatorClient,
    InvitationUrl,
    NoAnswerError,
    Problem,
    RefusedError,
    client_over_tls,
    fetch_authority,
    parse_invitation_url,
)
from ttlaunch.running.membership.fingerprints import differences
from ttlaunch.running.membership.link import CoordinatorLink
from ttlaunch.running.membership.measure import MEASURE_S, MeasureError, measure_fingerprint
from ttlaunch.running.membership.taking_part import Participation, Wish
from ttlaunch.system_reason import system_reason

_LONGEST_NAME = 100
_LONGEST_TOKEN = 200
_MOST_NUMBER = 9999
_WORKER = re.compile(r"worker-[0-9]{4}\Z", re.ASCII)
_TO_LEAVE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class JoinRequest:
    """What a user of this machine gives to join a run.

    Attributes:
        url: The address of the invitation.
        token: Its token.
        name: What to call the worker in views; may be empty.
        recipe: The recipe on this machine; None for the name that it has in the run.
        data: The training text on this machine; None for the path in the run's configuration.
        address: The IP address at which other workers reach this machine; None for the one from which it reaches the run.
        runs_dir: The folder in which the worker's own run folder is made.
        again: The name of the worker that this machine was before, such as `worker-0034`; None for a new one.
    """

    url: str
    token: str
    name: str = ""
    recipe: str | None = None
    data: str | None = None
    address: str | None = None
    runs_dir: Path = Path("runs")
    again: str | None = None


@dataclass(frozen=True)
class Joined:
    """A worker that has taken part.

    Attributes:
        worker_id: Its name in the run.
        run_id: The run.
        participation: How it took part.
        outcome: Its own report and folder on this machine.
    """

    worker_id: str
    run_id: str
    participation: Participation
    outcome: Outcome


def join_run(
    request: JoinRequest, dialogue: Dialogue, *, report_progress: Callable[[str], None] = lambda _: None
) -> Joined:
    """Join a run, and return when the worker has ended.

    Nothing that the run sends is executed: recipe and text are this machine's, and it registers only if they are the run's.
    The first SIGINT, SIGTERM or SIGHUP has the worker leave at the next boundary of a step, the second ends it at once.

    Args:
        request: The invitation and the options.
        dialogue: Receives warnings.
        report_progress: Called with lines for the user.

    Raises:
        LaunchError: The run cannot be reached, or this machine cannot take part; nothing was started.
    """
    url = _parsed(request)
    with _as_diagnostics(url):
        authority = fetch_authority(url)
        with closing(client_over_tls(url, authority, token=request.token)) as client:
            run = described_run(client)
            report_progress(f"run {shown(run.run_id)} trains {shown(run.recipe)}; this machine is compared with it")
            plan = plan_worker(run, dialogue, working_folder=Path.cwd(), recipe=request.recipe, data=request.data)
            own, wish = _compared(plan, run), Wish()
            with _held_port() as port, handled(dict.fromkeys(_TO_LEAVE, wish.note)):
                address = request.address or _own_address(url)
                welcome, key = _register(client, own, request, place=(address, port))
                report_progress(f"this machine takes part as {welcome.worker_id}; Ctrl-C leaves after the step")
                link = CoordinatorLink(welcome, _opens(url, authority, welcome.token), report_progress)
                # Another name than that of every other worker's host, even on one machine: their folders differ.
                plan = numbered(plan, _number_of(welcome), host=f"{welcome.worker_id}.{socket.gethostname()}")
                variables = _variables(welcome, (address, port), authority=authority, key=key)
                participation, outcome = run_worker(
                    plan, link, dialogue, config=run.config, runs_dir=request.runs_dir, variables=variables, wish=wish
                )
    return Joined(welcome.worker_id, run.run_id, participation, outcome)


def described_run(client: CoordinatorClient) -> RunDescription:
    """Ask a run what a worker must know of it; it answers when it has measured its own machine, which a busy one does slowly.

    Raises:
        NoAnswerError: There was no answer in time, or none that can be used.
        RefusedError: The run refuses.
    """
    return client.ask(RunDescription, "GET", "/run", within_s=MEASURE_S + ANSWER_S)


def _parsed(request: JoinRequest) -> InvitationUrl:
    url = parse_invitation_url(request.url)
    if isinstance(url, str):
        message = f"`{shown(request.url, longest=120)}` is no invitation: {url}"
        raise usage_error(message, INVITES, code="P080")
    token = request.token
    if not token or len(token) > _LONGEST_TOKEN or not (token.isascii() and token.isprintable()) or " " in token:
        # The text is not shown: it may be a secret of something else.
        message = f"the token of the invitation is {'empty' if not token else 'not one word of letters and digits'}"
        raise usage_error(message, INVITES, code="P080")
    if len(request.name) > _LONGEST_NAME or not request.name.isprintable():
        raise usage_error(f"`--name {shown(request.name)}`: a name has at most {_LONGEST_NAME} printable characters")
    if request.again is not None and not _WORKER.match(request.again):
        raise usage_error(f"`--again {shown(request.again)}` is no worker", "`--again worker-0034`, for example")
    if request.address is not None and not _is_address(request.address):
        raise usage_error(f"`--address {shown(request.address)}` is no IP address", "`--address 10.0.0.2`, for example")
    return url


def _is_address(text: str) -> bool:
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return False


@contextmanager
def _as_diagnostics(url: InvitationUrl) -> Iterator[None]:
    """Report what the coordinator refuses, or why it gives no answer."""
    try:
        yield
    except NoAnswerError as error:
        raise LaunchError([no_answer(error, url.place)]) from error
    except RefusedError as error:
        raise LaunchError([refused(error)]) from error


def _compared(plan: LaunchPlan, run: RunDescription) -> Fingerprint:
    """Compare this machine with the run before the run hears of it, and return this machine's fingerprint."""
    try:
        own = measure_fingerprint(plan)
    except MeasureError as error:
        message = f"this machine cannot be compared with the run: {error}"
        hint = f"`{sys.executable} -c 'import torch'` tries it by hand"
        raise LaunchError([Diagnostic("R085", message, hints=(hint,), blame=Blame.HOSTS)]) from error
    if found := differences(run.fingerprint, own):
        raise LaunchError([different(found)])
    return own


@contextmanager
def _held_port() -> Iterator[int]:
    """Hold a port on which the worker will listen for the others; nobody listens on it before."""
    try:
        held = hold_port()
    except OSError as error:
        message = f"this machine has no free port for its worker: {system_reason(error)}"
        raise LaunchError([Diagnostic("P068", message, blame=Blame.HOSTS)]) from error
    with held:
        yield held.getsockname()[1]


def _own_address(url: InvitationUrl) -> str:
    """Return the address from which this machine reaches the run; no packet is sent to find it."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(url.host, url.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        message = f"the address of this machine towards {shown(url.host)} cannot be found: {system_reason(error)}"
        raise usage_error(message, "`--address IP` names the one at which other workers reach it") from error


def _register(
    client: CoordinatorClient, own: Fingerprint, request: JoinRequest, *, place: tuple[str, int]
) -> tuple[Welcome, str]:
    """Register, and return the answer and the private key of the certificate in it, which never leaves this machine."""
    key, certificate_request = make_request()
    body = {
        "ip_address": place[0],
        "port": place[1],
        "fingerprint": vars(own),
        "name": request.name,
        "certificate_request": certificate_request,
        **({"worker_id": request.again} if request.again else {}),
    }
    return client.ask(Welcome, "POST", "/workers/register", body=body), key


def _opens(url: InvitationUrl, authority: bytes, token: str) -> Callable[[], CoordinatorClient]:
    return lambda: client_over_tls(url, authority, token=token)


def _variables(welcome: Welcome, place: tuple[str, int], *, authority: bytes, key: str) -> dict[str, str]:
    """Return what the rank gets besides its plan: the run, who it is, where it listens, and its certificate."""
    address = f"[{place[0]}]:{place[1]}" if ":" in place[0] else f"{place[0]}:{place[1]}"
    proof = {"authority": ssl.DER_cert_to_PEM_cert(authority), "own": welcome.certificate, "key": key}
    return {
        contract.ENV_WORLD: welcome.run_id,
        contract.ENV_INCARNATION: str(welcome.incarnation),
        contract.ENV_PEERS: json.dumps([*[None] * _number_of(welcome), address]),
        contract.ENV_CERTIFICATES: json.dumps(proof),
    }


def _number_of(welcome: Welcome) -> int:
    digits = welcome.worker_id.removeprefix("worker-")
    number = int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= len(str(_MOST_NUMBER)) else -1
    if number < 0 or welcome.worker_id != contract.worker_name(number) or not welcome.certificate:
        raise NoAnswerError(Problem.UNUSABLE, "it gives no number and no certificate")
    return number
