"""Start the agent of one run on one host: a daemon that outlives the connection over which it was started.

The agent makes the run's folder, keeps the code from being removed, and sends the launcher what shims and ranks write, as
they write it. In the end it kills every process that carries the run's id: when the launcher orders it, or when no frame
has come from the launcher for as long as the lease lasts, or when Slurm has ended the step in which the agent was started.

No port is opened: the daemon listens on a socket in the run's private folder, and this script, like `bridge.py` after a lost
connection, carries bytes between that socket and the SSH channel. Python 3.9 and the standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import socket
import stat

from ttlaunch import contract
from ttlaunch.agent import bridge, claims
from ttlaunch.agent.agent_server import AgentServer
from ttlaunch.agent.held_port import hold_port
from ttlaunch.agent.hosted_run import HostedRun
from ttlaunch.agent.line import forget, listen
from ttlaunch.agent.run_processes import processes_of_runs
from ttlaunch.agent.starter import Starter
from ttlaunch.agent.take_over import take_over

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_KEPT_RUNS = 20
_CLAIM = "agent"


def main(arguments: dict[str, Any]) -> int:
    """Start the agent that the arguments describe, and be the launcher's first connection to it.

    Args:
        arguments: `run_id`; `folder`: the run's folder, absolute; `files`: name to text; `scratch`: a folder for
            sockets and shared memory, absolute; `ranks`: those of this host; `daemons`: names of the engine's
            processes, which are killed last; `starter`: the command that starts ranks when it is ordered to, or None if the
            engine reaches this host itself; `needed`: what each folder that the run needs is for, with its path; `socket`: the
            path to listen at; `lock`: a file to lock, shared, while the run lasts; `holds_ports`: how many ports to hold for
            ranks; `lease_s`: seconds that ranks may run without a frame from the launcher. On a host that was given up, also
            `replaces`, see `take_over`.
    """
    try:
        umask = os.umask(0o077)  # what the agent writes is the user's alone; ranks keep the host's
        if "replaces" in arguments:
            take_over(arguments)
        claim, locks = _prepare(arguments)
        held = [hold_port() for _ in range(arguments.get("holds_ports", 0))]
        listener = listen(arguments["socket"])
    except OSError as error:
        reason = f"{error.filename or arguments['folder']}: {error.strerror or error}"
        os.write(1, contract.pack_frame({"kind": "refused", "reason": reason}))
        return 1
    # The listener is bound before the fork, so that the connection at the end of this function cannot come too early.
    child = os.fork()
    if not child:
        _detach()
        _attend(arguments, listener, claim, held, umask)
    os.waitpid(child, 0)
    listener.close()
    for port in held:
        port.close()
    claims.release([claim, *locks])  # the agent keeps them
    return bridge.main(arguments)


def _detach() -> None:
    """Become a daemon: leave the SSH connection's session, close its descriptors, and continue in a child process."""
    os.setsid()
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)


def _attend(  # noqa: PLR0917
    arguments: dict[str, Any], listener: socket.socket, claim: int, held: Sequence[socket.socket], umask: int
) -> None:
    """Be the agent, which holds a claim on its folder in shared memory and perhaps ports; never returns."""
    lease_s = float(arguments["lease_s"])
    run = HostedRun(
        arguments["run_id"],
        arguments["folder"],
        arguments["scratch"],
        own_ranks=arguments["ranks"],
        daemons=arguments.get("daemons", ()),
        needed=arguments.get("needed"),
    )
    server = AgentServer(run, listener, lease_s=lease_s, held=held, step=_step_pipe())
    try:
        if arguments.get("starter"):
            scratch = arguments["scratch"]
            server.starter = Starter(arguments["starter"], run_id=arguments["run_id"], scratch=scratch, umask=umask)
        why = server.serve()
        if why is None:
            run.remove_collected()
        else:
            run.fence(f"its agent {why} and ended its ranks")
    except BaseException as error:  # noqa: BLE001 - whatever failed, no rank may run on without an agent
        run.fence(f"its agent broke: {type(error).__name__}: {error}")
    finally:
        forget(arguments["socket"])
        # On the launching machine, or on a machine with two host names, other processes use the same folder.
        os.close(claim)
        claims.remove_if_abandoned(arguments["scratch"])
        server.close()
        os._exit(0)


def _step_pipe() -> int | None:
    """Return the pipe that the shell of this Slurm step reads until all daemons have ended; None outside of a job."""
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(contract.STEP_PIPE).st_mode)
    except OSError:
        return None
    return contract.STEP_PIPE if is_pipe and "SLURM_JOB_ID" in os.environ else None


def _prepare(arguments: dict[str, Any]) -> tuple[int, list[int]]:
    """Make the folders and files of the run.

    Returns:
        The claim on the run's folder in shared memory, and descriptors that lock its folder, its code and its environment.
    """
    folder, scratch = arguments["folder"], arguments["scratch"]
    held = []
    if arguments.get("lock"):
        held.append(os.open(arguments["lock"], os.O_RDWR | os.O_CREAT, 0o644))
        fcntl.flock(held[0], fcntl.LOCK_SH)
    held += _hold_environment(arguments.get("python", ""))
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    claims.close_to_others(os.path.dirname(folder))
    _prune(os.path.dirname(folder))
    for name in (contract.LOGS_DIR, contract.RECORDS_DIR):
        os.makedirs(os.path.join(folder, name), exist_ok=True)
    os.chmod(folder, 0o700)
    held.append(claims.claim_existing(folder, _CLAIM))
    for name, text in arguments["files"].items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)
    claims.remove_abandoned(os.path.dirname(scratch))
    os.makedirs(os.path.dirname(scratch), mode=0o700, exist_ok=True)
    claim = claims.claim(scratch, _CLAIM)
    # A host that was away for a while may have been set up anew, without the code that was copied to it.
    for what, path in (arguments.get("needed") or {}).items():
        if not os.path.isdir(path):
            raise FileNotFoundError(errno.ENOENT, f"{what} is gone", path)
    return claim, held


def _hold_environment(python: str) -> list[int]:
    """Lock the environment of the ranks' interpreter, if `ttlaunch prepare` made it, so that no later `prepare` removes it.

    The lock is needed because containers that share the remote folder do not see each other's processes.
    """
    environment = os.path.realpath(os.path.dirname(os.path.dirname(python)))
    if os.path.basename(os.path.dirname(environment)) != "envs":
        return []
    descriptor = os.open(environment, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return [descriptor]


def _prune(runs: str) -> None:
    """Remove the oldest folders of runs that have ended, whose content the launcher has had for long."""
    ids = sorted(name for name in os.listdir(runs) if os.path.isdir(os.path.join(runs, name)))
    old = ids[:-_KEPT_RUNS]
    alive = {run_id for _, run_id in processes_of_runs()} if old else set()
    for run_id in old:
        # The processes of a run may be out of sight, in another container or on a host that shares this folder.
        taken = claims.take_claims(os.path.join(runs, run_id))
        if taken is not None and run_id not in alive:
            shutil.rmtree(os.path.join(runs, run_id), ignore_errors=True)
        claims.release(taken or [])
