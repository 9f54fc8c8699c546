"""Parse the names of sinks for metrics and logs, check what each needs, and open one."""

import importlib.util
import os
from functools import partial
from pathlib import Path
from typing import Protocol

from ttlaunch import contract
from ttlaunch.diagnostics import Blame, Diagnostic, did_you_mean, listed, shown
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.running.metrics.addresses import parse_loki_address, parse_otlp_address
from ttlaunch.running.metrics.event_log import Event, LoggedRun

_LIBRARIES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "prometheus": None,
    "loki": None,
    "loki-file": None,
    "otlp": "opentelemetry.proto.collector.logs.v1.logs_service_pb2",
}
LOG_SINKS = ("loki", "loki-file", "otlp")
"""Sinks that take the lines of ranks; `otlp` takes metrics, too."""
ONLY_LINES = ("loki", "loki-file")
CONTINUED = ("loki", "otlp")
"""Sinks that continue an interrupted export, and whose servers know what they have already."""
_NEEDS_ADDRESS = {"loki": parse_loki_address, "otlp": parse_otlp_address}
_FORMS = {"loki": "loki=http://HOST:3100[?job=NAME&metadata=off]", "otlp": "otlp=http://HOST:4318"}
_EXAMPLES = (
    "tensorboard=DIR, wandb[=DIR], mlflow=DIR, prometheus=FILE.prom, loki=http://HOST:3100, loki-file=DIR "
    "and otlp=http://HOST:4318 are known"
)
_CREDENTIALS = {
    "loki": "LOKI_USERNAME and LOKI_PASSWORD, or LOKI_BEARER_TOKEN",
    "otlp": "OTEL_EXPORTER_OTLP_HEADERS",
    "mlflow": "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
}
"""The environment variables from which a sink takes credentials."""


class Sink(Protocol):
    """Receives the events of one run; each call may raise anything that its library raises."""

    def take(self, event: Event) -> None:
        """Receive the next event of the log."""

    def flush(self) -> str | None:
        """Make all received events visible to readers soon; called after each batch of events.

        Returns:
            Why a server has not taken all of them, in a clause; None if there is nothing to wait for.
        """

    def close(self, status: str) -> None:
        """Close the sink after the last event; `status` is that of the run."""


@dataclass(frozen=True)
class SinkChoice:
    """A sink as the user named it.

    Attributes:
        kind: One of the names in `_LIBRARIES`.
        place: The folder, file or address to which the sink writes; None for a folder below the run's.
    """

    kind: str
    place: str | None

    def __str__(self) -> str:
        return self.kind if self.place is None else f"{self.kind}={self.place}"

    def place_in(self, folder: Path) -> str:
        """Return the place to which the sink writes for the run in a folder."""
        return self.place or str(folder / contract.SINKS_DIR / self.kind)


_mistake = partial(Diagnostic, blame=Blame.COMMAND_LINE)


def parse_sink(text: str, *, option: str, working_folder: Path) -> SinkChoice | Diagnostic:
    """Parse `KIND` or `KIND=PLACE`, or report why such a sink cannot be used, without importing its library.

    Args:
        text: The value of the option.
        option: The option that has this value.
        working_folder: The folder to which the place is relative, unless the place is a web address.
    """
    kind, equals, place = text.partition("=")
    if kind not in _LIBRARIES or not (place or (not equals and kind not in _NEEDS_ADDRESS)):
        no_place = f"`{option} {shown(text)}` names no place"
        message = no_place if kind in _LIBRARIES else f"no sink is called {shown(kind)!r}"
        hints = did_you_mean(kind, _LIBRARIES) if kind not in _LIBRARIES and not equals else ()
        return _mistake("P046", message, notes=(_EXAMPLES,), hints=hints)
    if (mistake := _address_mistake(kind, place, option=option)) is not None:
        return mistake
    library = _LIBRARIES[kind]
    if library is not None and not _is_installed(library):
        hint = f"`pip install 'ttlaunch[{kind}]'`, or `pip install {_distribution(kind)}`"
        message = (
            f"`{option} {shown(text)}` needs the Python package `{_package(library)}`, which is not installed here"
        )
        return _mistake("P047", message, notes=(f"sinks: {listed(_LIBRARIES)}",), hints=(hint,))
    if place and "://" not in place:
        place = os.path.join(working_folder, os.path.expanduser(place))  # noqa: PTH111, PTH118 - these never raise
        reason = _why_unwritable(kind, Path(place))
        if reason is not None:
            return _mistake("P032", f"`{option} {shown(text)}` cannot be written: {reason}")
    return SinkChoice(kind, place or None)


def _address_mistake(kind: str, place: str, *, option: str) -> Diagnostic | None:
    """Refuse an address that contains credentials, without showing it, or that cannot be used."""
    if "://" in place and "@" in place.partition("://")[2].partition("/")[0]:
        hints = (f"put them into {_CREDENTIALS[kind]}",) if kind in _CREDENTIALS else ()
        notes = ("other users can read it in the list of processes, and the run's folder would contain it",)
        return _mistake("P088", f"the address of the sink {kind} contains credentials", notes=notes, hints=hints)
    if kind not in _NEEDS_ADDRESS:
        return None
    reason = _NEEDS_ADDRESS[kind](place)
    if not isinstance(reason, str):
        return None
    notes = (f"`{option} {_FORMS[kind]}` is expected",)
    return _mistake("P088", f"`{option} {shown(f'{kind}={place}')}` cannot be used: {reason}", notes=notes)


def _why_unwritable(kind: str, place: Path) -> str | None:
    """Return why a sink cannot write to a place, if that can be known without writing; else None."""
    if kind == "prometheus":
        if os.path.isdir(place):  # noqa: PTH112 - never raises
            return "it is a folder, and a file was expected"
        place = place.parent
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not os.path.isdir(place):  # noqa: PTH112 - never raises
        return f"{place} is no folder"
    return None if os.access(place, os.W_OK | os.X_OK) else f"{place} may not be written to"


def _is_installed(library: str) -> bool:
    """Whether a package is installed; a folder of that name, as some sinks make, does not count."""
    try:
        spec = importlib.util.find_spec(library)
    except ModuleNotFoundError:  # of the package above it
        return False
    return spec is not None and spec.origin is not None


def _package(library: str) -> str:
    """Return the part of a module's name by which people know it."""
    return library.partition(".collector")[0]


def _distribution(kind: str) -> str:
    return {"mlflow": "mlflow-skinny", "otlp": "opentelemetry-proto"}.get(kind, kind)


def open_sink(choice: SinkChoice, run: LoggedRun, *, folder: Path) -> Sink:
    """Open a sink; this imports the sink's library, so call it in a process of its own."""
    place = choice.place_in(folder)
    match choice.kind:
        case "tensorboard":
            from ttlaunch.running.metrics.to_tensorboard import TensorBoardSink  # noqa: PLC0415

            return TensorBoardSink(run, Path(place))
        case "wandb":
            from ttlaunch.running.metrics.to_wandb import WandbSink  # noqa: PLC0415

            return WandbSink(run, Path(place))
        case "mlflow":
            from ttlaunch.running.metrics.to_mlflow import MlflowSink  # noqa: PLC0415

            return MlflowSink(run, place)
        case "loki":
            from ttlaunch.running.metrics.to_loki import LokiSink  # noqa: PLC0415

            return LokiSink(run, place, path=folder, sinks_folder=folder / contract.SINKS_DIR)
        case "otlp":
            from ttlaunch.running.metrics.to_otlp import OtlpSink  # noqa: PLC0415

            return OtlpSink(run, place, path=folder, sinks_folder=folder / contract.SINKS_DIR)
        case "loki-file":
            from ttlaunch.running.metrics.to_loki_file import LokiFileSink  # noqa: PLC0415

            return LokiFileSink(run, Path(place), path=folder)
        case _:
            from ttlaunch.running.metrics.to_prometheus import PrometheusSink  # noqa: PLC0415

            return PrometheusSink(run, Path(place))
