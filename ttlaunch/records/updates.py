"""What a rank records of an update whose gradients may be old, and of a loss that is no number. Python 3.9, standard library only."""

from __future__ import annotations

from ttlaunch.records.parser import Count, Number, Step, Time, record


@record
class Update:
    """What an update was made of, in a run whose gradients may be older than the weights that they change.

    Attributes:
        step: The number of the update.
        task: The step whose data its gradients were computed from.
        parts: Micro-batches of the task in rows, in the order in which their gradients were added: the first, one past the last, and
            the number of updates in the weights that the gradient was computed with.
        epoch: The epoch of an elastic run in which it was made, else 0. Of several records of one step that of the latest epoch is
            true: a worker that was lost may have recorded, and even made, an update that the others then made anew.
    """

    time: Time
    step: Step
    task: Step
    parts: tuple[tuple[Count, Count, Count], ...]
    epoch: Count = 0


@record
class NotFinite:
    """The first micro-batch of a step whose loss is NaN or infinite on this rank."""

    time: Time
    step: Step
    micro_batch: Count
    loss: Number
