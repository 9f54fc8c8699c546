"""What `python -m ttlaunch.runtime.predict` has found about a plan: `prediction.json`.

Python 3.9 and the standard library only.
"""

from __future__ import annotations

from ttlaunch.records.parser import Size, record

PREDICTION_FILE = "prediction.json"
"""Its place in the folder of a run, or of the process that predicts."""
MAPPED_FROM = 128 * 1024
"""From so many bytes on, a piece of memory of a rank that has a limit is mapped by itself, and returned when it is freed."""


@record
class RankPrediction:
    """One rank; what has bytes by kind is empty if it made no step.

    Attributes:
        facts: The numbers that formulas of traffic need.
        held: What it holds from step to step.
        memory: The most at any moment of a step, and of all kinds together; also the most where freed memory of pieces smaller than
            `MAPPED_FROM` stays with the process, during a step (`extent`) and at its end (`left`); and the
            most of these pieces (`small`).
        workspace_bytes: What the library of matrix products keeps.
    """

    facts: dict[str, Size]
    held: dict[str, Size]
    memory: dict[str, Size]
    workspace_bytes: Size = 0


@record
class PredictionEnd:
    """All ranks, and what a process with torch and the transport takes before it has any tensor.

    Attributes:
        library_shared_bytes: Those of `library_bytes` that are pages of files, of which all ranks of a host have the same.
        computing_bytes: What torch loads for the first step that it computes.
        computing_shared_bytes: Those of `computing_bytes` that are pages of files.
        data_bytes: What the training data takes in each rank.
        data_most_bytes: What it takes at most while it is prepared.
    """

    library_bytes: Size
    ranks: tuple[RankPrediction, ...]
    library_shared_bytes: Size = 0
    computing_bytes: Size = 0
    computing_shared_bytes: Size = 0
    data_bytes: Size = 0
    data_most_bytes: Size = 0
