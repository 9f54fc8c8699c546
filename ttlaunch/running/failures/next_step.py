"""The one thing to do next about a failure: what fits most often where a rank broke in this way."""

from ttlaunch.running.failures.causes import Cause
from ttlaunch.running.failures.failure import Failure

_ROLE_OF_PROGRAMS = "rank"  # of ranks that run no recipe
_RESUME = "`ttlaunch run RECIPE --resume latest` goes on from the newest checkpoint"
_STEPS = {
    Cause.OUT_OF_MEMORY: "lower `training_config.micro_batch_size` or `transformer_config.max_sequence_length`, or run "
    "fewer ranks on the host",
    Cause.IMPORT_ERROR: "install it for the interpreter of the ranks; on hosts `ttlaunch prepare --on NAME` does",
    Cause.LEFT_EARLY: "look for what calls `sys.exit` or `os._exit` in the role or in a library that it uses",
    Cause.KILLED: f"find out who sent it: a person, a batch system at its limit, a watchdog; {_RESUME}",
    Cause.SHIM_LOST: f"find out who kills processes on that host; {_RESUME}",
    Cause.DAEMON_LOST: f"find out who kills processes on that host; {_RESUME}",
    Cause.LOST_PEER: "`ttlaunch doctor --on NAME` tries the network between the hosts",
}
_STEPS_OF_PROGRAMS = {
    Cause.OUT_OF_MEMORY: "let a rank hold less, or run fewer ranks on the host",
    Cause.KILLED: "find out who sent it: a person, a batch system at its limit, a watchdog",
    Cause.SHIM_LOST: "find out who kills processes on that host",
}


def next_step(failure: Failure) -> str | None:
    """The hint for a failure; None where there is nothing better than to read the log."""
    if failure.kind is Cause.LOST_PEER and failure.host == "localhost":
        return None
    steps = _STEPS | _STEPS_OF_PROGRAMS if failure.role == _ROLE_OF_PROGRAMS else _STEPS
    return steps.get(failure.kind)
