"""The context of a rank in a replay: it stops the rank after a step, watches it there, and records digests on the way."""

import bdb
import pdb  # noqa: T100 - `--break` asks for a debugger
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ttlaunch.records.replay import ReplayOrder, ShownRank
from ttlaunch.runtime.checkpoint.checkpoints import HasParameters, HasState, held_tensors
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.data.batches import MicroBatch, TrainingData
from ttlaunch.runtime.replay.observer import StepObserver
from ttlaunch.runtime.serving.text import NamedTokenizer, make_tokenizer
from ttlaunch.runtime.stop_order import StopOrder
from ttlaunch.runtime.telemetry.traffic_counter import UPDATE, TrafficCounter
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.corpus import Corpus
from ttlaunch.spec.recipe.images import has_images
from ttlaunch.spec.recipe.sections import TrainingFile

_LONGEST_TEXT = 4000


class ReplayedContext(RankContext):
    """A rank's context in a replay; what the recipe computes and sends is what it computes and sends in a run.

    Attributes:
        observer: What the rank has in the last step.
    """

    def __init__(self, order: ReplayOrder, *, corpus: Corpus | None, traffic: TrafficCounter, **known: Any) -> None:
        """Make the context; the further arguments are those of `RankContext`."""
        self.observer = StepObserver()
        self.order = order
        self._text: _Text | None = None
        steps_done = known["checkpoints"].steps_done if known.get("checkpoints") else 0
        stop_order = StopOrder(steps_done=steps_done)
        stop_order.decide(order.step)
        super().__init__(corpus=corpus, traffic=traffic, stop_order=stop_order, **known)
        self.auditor.is_on = False
        if isinstance(traffic, WatchedTraffic):
            traffic.follow(begin=self._begin_step, update=self._begin_update)

    def shown(self) -> ShownRank:
        """Return what the rank had in the step that is shown."""
        texts = self._text.of if self._text is not None else lambda _inputs, _targets: ()
        return self.observer.state(rank=self.rank, role=self.role, texts=texts)

    def data(self, cfg: TrainingFile) -> TrainingData:
        known = super().data(cfg)
        if self._text is None:
            self._text = _Text(cfg, self._corpus, known)
            watched: Any = _WatchedData(known, self)
            self._data = known = watched
        return known

    def watch(self, model: nn.Module, *, values: int) -> TrafficCounter:
        if self.order.shown:
            self.observer.watch(model)
        return super().watch(model, values=values)

    def restore(self, model: HasParameters, optimizer: HasState, *, is_given: bool = True) -> None:
        self.observer.model, self.observer.optimizer = model, optimizer
        super().restore(model, optimizer, is_given=is_given)

    def compare(self, step: int, held: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._note_state(step, held)
        if self.order.digests or step == self.order.step:
            self._report_digests(step, held)
        else:
            super().compare(step, held)

    def checkpoint(self, step: int, model: HasParameters, optimizer: HasState, *, owners: Sequence[Rank] = ()) -> bool:
        self._note_state(step, lambda: held_tensors(model, optimizer))
        # Only the last one is compared with the run's; earlier ones would fill the disk.
        return step == self.order.step and super().checkpoint(step, model, optimizer, owners=owners)

    def report(self, step: int, **values: float) -> None:
        super().report(step, **values)
        if step == self.order.step:
            self.observer.end()

    def _note_state(self, step: int, held: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        if step == self.order.step and self.order.shown:
            self.observer.note_state(held())

    def _begin_step(self, step: int) -> None:
        if step != self.order.step:
            return
        if self.order.shown:
            self.observer.begin()
        if self.order.line is not None and self.order.file is not None and self.order.rank == self.rank:
            break_at(self.order.file, self.order.line)

    def _begin_update(self) -> None:
        if self.observer.is_active:
            self.observer.note_gradients()


class WatchedTraffic(TrafficCounter):
    """A traffic counter that says when a step and an update begin."""

    _begun: Callable[[int], None] | None = None
    _updating: Callable[[], None] | None = None

    def follow(self, *, begin: Callable[[int], None], update: Callable[[], None]) -> None:
        """Call `begin` with each step, and `update` before each update of weights."""
        self._begun, self._updating = begin, update

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if self._begun is not None:
            self._begun(step)

    def enter(self, phase: str, *, micro_batch: int | None = None) -> None:
        super().enter(phase, micro_batch=micro_batch)
        if phase == UPDATE and self._updating is not None:
            self._updating()


class _WatchedData:
    """Training data that notes which micro-batches a rank reads in the step that is shown."""

    def __init__(self, data: TrainingData, ctx: ReplayedContext) -> None:
        self._data, self._ctx = data, ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def training_batch(self, step: int, index: int) -> MicroBatch:
        batch = self._data.training_batch(step, index)
        if step == self._ctx.order.step and self._ctx.order.shown:
            self._ctx.observer.note_batch(*batch)
        return batch


class _Text:
    """Makes the text of a micro-batch from its tokens."""

    def __init__(self, cfg: TrainingFile, corpus: Corpus | None, data: TrainingData) -> None:
        self._cfg, self._corpus, self._vocabulary = cfg, corpus, data.vocabulary
        self._tokenizer: NamedTokenizer | None = None

    def of(self, inputs: Tensor, targets: Tensor) -> list[str]:
        """Return the text of each sequence; for images, the label of each; at most some thousand characters of each."""
        if has_images(self._cfg):
            return [f"label {int(label)}" for label in targets[:, 0]]
        if self._tokenizer is None:
            kind = self._cfg.training_config.tokenizer_type
            alphabet = sorted({ord(one) for one in self._corpus.characters}) if kind == "char" and self._corpus else ()
            try:
                self._tokenizer = make_tokenizer(kind, vocabulary=self._vocabulary, alphabet=alphabet)
            except ValueError:  # generated sequences have tokens of their own
                self._tokenizer = make_tokenizer("ids", vocabulary=self._vocabulary)
        pieces = [b"".join(map(self._tokenizer.piece, row)) for row in inputs.tolist()]
        return [piece.decode("utf-8", "replace")[:_LONGEST_TEXT] for piece in pieces]


def break_at(file: str, line: int) -> None:
    """Open a debugger in this thread before it runs a line, now or in any call that it makes from here on."""
    debugger = pdb.Pdb(nosigint=True)
    debugger.prompt = "(replay) "
    problem = debugger.set_break(file, line)
    if problem is not None:
        raise ValueError(f"no breakpoint at {file}:{line}: {problem}")
    # Frames that are already on the stack have no trace function yet, and the line may be in one of them.
    frame = sys._getframe().f_back  # noqa: SLF001  as pdb itself does
    debugger.reset()
    while frame is not None:
        frame.f_trace = debugger.trace_dispatch
        debugger.botframe = frame
        frame = frame.f_back
    debugger.set_continue()
    sys.settrace(debugger.trace_dispatch)


def is_left(error: BaseException) -> bool:
    """Whether somebody has left the debugger."""
    return isinstance(error, bdb.BdbQuit)
