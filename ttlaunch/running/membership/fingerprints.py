"""Compare what decides the bits on two machines: a worker that differs in any of it cannot take part in a run."""

from dataclasses import dataclass

from ttlaunch.records.coordinator import Fingerprint

NAMES = {
    "release": "the code of ttlaunch",
    "recipe": "the recipe's files",
    "config": "the configuration",
    "corpus": "the training text",
    "torch": "the build of torch",
    "cpu_capability": "the vector instructions that torch uses",
    "threads": "the number of threads that torch uses",
    "device": "the device that a rank computes on",
}
"""Each field of a fingerprint, as messages name it."""


@dataclass(frozen=True)
class Difference:
    """A field in which a worker differs from a run.

    Attributes:
        field: Its name in the fingerprint.
        run: The run's value.
        worker: The worker's value.
    """

    field: str
    run: str
    worker: str


def differences(run: Fingerprint, worker: Fingerprint) -> list[Difference]:
    """Return all fields in which a worker differs from a run, in the order in which they are best mended."""
    pairs = [(name, str(getattr(run, name)), str(getattr(worker, name))) for name in NAMES]
    return [Difference(name, ours, theirs) for name, ours, theirs in pairs if ours != theirs]
