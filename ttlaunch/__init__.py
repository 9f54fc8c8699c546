"""Start and supervise distributed training from a description of the hardware.

    >>> import ttlaunch
    >>> report = ttlaunch.run("hierarchical_parallel", set={"training_config.steps": 20})   # doctest: +SKIP
    >>> report.raise_for_failure()                                                           # doctest: +SKIP

Python 3.9 and the standard library only, and next to nothing to import: the shim around each rank imports this package on
hosts that may have nothing else. The names below are imported on first use; `docs/reference/python.md` describes them.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time to import it
if TYPE_CHECKING:
    from ttlaunch.app.library import Runs, Validation, attach, plan, run, runs, start, validate
    from ttlaunch.app.report import Report
    from ttlaunch.app.run_handle import LogLine, Metrics, Run
    from ttlaunch.diagnostics.diagnostic import Diagnostic
    from ttlaunch.diagnostics.launch_error import LaunchError
    from ttlaunch.lab.simulate import Simulation, simulate
    from ttlaunch.planning.launch_plan import LaunchPlan as Plan
    from ttlaunch.replayed import Replayed, replay
    from ttlaunch.script_log import log

__all__ = [
    "Diagnostic",
    "LaunchError",
    "LogLine",
    "Metrics",
    "Plan",
    "Replayed",
    "Report",
    "Run",
    "Runs",
    "Simulation",
    "Validation",
    "__version__",
    "attach",
    "log",
    "plan",
    "replay",
    "run",
    "runs",
    "simulate",
    "start",
    "validate",
]

_LIBRARY = "ttlaunch.app.library"
_DEFINED_IN = {
    "Diagnostic": "ttlaunch.diagnostics.diagnostic",
    "LaunchError": "ttlaunch.diagnostics.launch_error",
    "LogLine": "ttlaunch.app.run_handle",
    "Metrics": "ttlaunch.app.run_handle",
    "Plan": "ttlaunch.planning.launch_plan",
    "Replayed": "ttlaunch.replayed",
    "Report": "ttlaunch.app.report",
    "Run": "ttlaunch.app.run_handle",
    "Runs": _LIBRARY,
    "Simulation": "ttlaunch.lab.simulate",
    "Validation": _LIBRARY,
    "attach": _LIBRARY,
    "log": "ttlaunch.script_log",
    "plan": _LIBRARY,
    "replay": "ttlaunch.replayed",
    "run": _LIBRARY,
    "runs": _LIBRARY,
    "simulate": "ttlaunch.lab.simulate",
    "start": _LIBRARY,
    "validate": _LIBRARY,
}
_DEFINED_AS = {"Plan": "LaunchPlan"}


def __getattr__(name: str) -> object:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module 'ttlaunch' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - the shim imports this package and needs none of its names

    return getattr(import_module(_DEFINED_IN[name]), _DEFINED_AS.get(name, name))


def __dir__() -> "list[str]":
    return sorted(__all__)
