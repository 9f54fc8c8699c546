"""Gathers the parameters of layers for the rank that computes with them, and checks by versions that none is stale.

A version is the number of steps in which a shard was updated. Owners publish the version of their shards after each update. A pass
reads one version. If a shard of a layer has another version, computing with that layer raises an error.

Shapes: N = values of the flat vector of the whole model. n = ranks, S = bytes of the weights.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ttlaunch.errors import TtlaunchError
from ttlaunch.runtime.comm.protocol import Communicator, Pending
from ttlaunch.runtime.comm.tree_exchange import next_around
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.zero.layout import Layer
from ttlaunch.runtime.parallel.zero.owned import OwnedParameters
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank

_VERSIONS, _WEIGHTS = 30_030, 30_031
_SLOTS = 2


class StaleShardError(TtlaunchError):
    """A pass would have read parameters of another step than its own."""

    message_is_complete = True


class GatheredWeights:
    """Gathers whole layers from the shards of all ranks.

    Up to stage 2 every rank has the whole model: owners send their shards right after the update, and a layer's first
    use waits for them. At stage 3 there are two buffers, which the layers use alternately: one layer computes while the
    next one arrives. A matrix that embedding and head share is gathered for each of them, as if there were two matrices.

    Cost: to gather a layer, each owner sends its shard to each other rank: `n - 1` messages and (n - 1)/n of the layer's
        bytes each way, as a ring. Stages 1 and 2 gather every layer once a step. Stage 3 gathers every layer for the
        forward pass, and all but the last two, which are still there, for the backward pass. `publish` sends 8 bytes a
        layer to each other rank.
    Order: every rank gathers the layers in the same order; nothing is added up.
    Source: S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
        Models", SC 2020; prefetching one layer ahead as in Y. Zhao et al., "PyTorch FSDP", VLDB 2023.

    Attributes:
        layers: The layers in the order of a forward pass.
    """

    def __init__(self, model: Model, owned: OwnedParameters, *, ctx: Communicator, among: Sequence[Rank]) -> None:
        """Take the model; at stage 3 its parameters get memory that layers share. Nothing is sent.

        Args:
            model: The model whose passes are watched; `fetch` must have returned for each layer before it runs.
            owned: The part of the model that this rank owns.
            ctx: The communicator of this rank.
            among: The ranks that share the model.
        """
        self._ctx, self._among, self._owned, self._model = ctx, among, owned, model
        self.layers = owned.layout.layers
        self._others = next_around(owned.place, len(among))
        self._versions = torch.zeros(len(among), len(self.layers), dtype=torch.int64)
        self._wanted = 0
        self._has: dict[int, int] = {}  # layer to the version that this rank has whole
        self._coming: dict[int, list[Pending]] = {}
        self._published: list[Pending] = []
        self._buffers: dict[int, list[tuple[Rank, Tensor]]] = {}  # by layer; the memory of a layer stays the same
        self._slots = self._share_memory(model) if owned.shares_parameters else []
        model.head_has_copy = owned.shares_parameters
        self._hook = model.register_forward_pre_hook(self._check, with_kwargs=True)

    def publish(self, version: int) -> None:
        """Announce the version of this rank's shards; at stages 1 and 2, also send the shards.

        Every rank must call, once a step, after its update.

        Cost: 8 bytes a layer (int64) to each other rank; at stages 1 and 2 also a gather of every layer; at stage 0
            none.
        """
        self.wait()
        self._versions[self._owned.place] = version
        if not self._owned.shares_state:
            self._versions[:] = version
            return
        mine = self._versions[self._owned.place]
        with operation(self._ctx, "versions"):
            for other in self._others:
                self._published.append(self._ctx.irecv(self._versions[other], source=self._among[other], tag=_VERSIONS))
            self._published += [self._ctx.isend(mine, dest=self._among[other], tag=_VERSIONS) for other in self._others]
        if not self._owned.shares_parameters:
            self._has.clear()
            for layer in self.layers:
                self._gather(layer)

    def begin(self, version: int) -> None:
        """Begin a pass, or a forward and a backward pass, over the parameters of this version."""
        self._wanted = version
        if self._owned.shares_parameters:
            self._has.clear()

    def fetch(self, index: int, *, then: int | None) -> None:
        """Wait until this rank has a whole layer; at stage 3, also begin to gather the next one, `then`.

        Every rank must call, for the layers in the same order. At stage 3 these two layers overwrite all others.

        Raises:
            StaleShardError: A rank has published another version than the pass reads.

        Cost: at stage 3 a gather of each of the two layers that this rank does not have; else no message of its own.
        """
        if self._owned.shares_parameters:
            for wanted in (index, then):
                if wanted is not None and wanted not in self._has and wanted not in self._coming:
                    self._gather(self.layers[wanted])
        for message in self._coming.pop(index, ()):
            message.wait()
        self._settle_versions()
        if not self._owned.shares_state:
            self._has[index] = int(self._versions[0, index])
        for other, version in enumerate(self._versions[:, index].tolist()):
            if version != self._wanted:
                raise StaleShardError(
                    f"rank {self._among[other]} has published version {version} of its shard of layer {index}, "
                    f"this step reads version {self._wanted}"
                )
        self._has[index] = self._wanted

    def close(self) -> None:
        """Watch the model's passes no longer: another object gathers its layers."""
        self._hook.remove()

    def wait(self) -> None:
        """Return when no message is under way, so that parameters may change."""
        self._settle_versions()
        for messages in self._coming.values():
            for message in messages:
                message.wait()
        self._coming.clear()

    def replicated(self) -> Iterator[tuple[str, Tensor]]:
        """Wait for the published weights, and yield the parameters of the model if every rank keeps all of them."""
        self.wait()
        if not self._owned.shares_parameters:
            yield from self._model.named_parameters()

    @property
    def buffer_bytes(self) -> int:
        """The bytes of the two buffers that layers use alternately at stage 3."""
        return sum(slot.untyped_storage().nbytes() for slot in self._slots)

    def check(self, index: int) -> None:
        """Return if a layer has the parameters that the pass reads.

        Raises:
            StaleShardError: The layer was not fetched, or has the parameters of another step.
        """
        has = self._has.get(index)
        if has != self._wanted:
            holds = "nothing" if has is None else f"version {has}"
            raise StaleShardError(
                f"rank {self._ctx.rank} holds {holds} of layer {index}, this step reads version {self._wanted}"
            )

    def _check(self, _model: Model, _inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        layer = named.get("layer")
        for index in range(len(self.layers)) if layer is None else [layer]:
            self.check(index)

    def _settle_versions(self) -> None:
        for message in self._published:
            message.wait()
        self._published.clear()

    def _gather(self, layer: Layer) -> None:
        """Begin to gather a layer into the memory of its parameters."""
        layout, place = self._owned.layout, self._owned.place
        mine = [(layout.kept(layer, place), self._owned.weights(layer))]
        if self._slots:
            whole = self._slots[layer.index % _SLOTS]
            for other in range(layer.index % _SLOTS, len(self.layers), _SLOTS):
                self._has.pop(other, None)
            again, _ = layout.use_again(layer, layer.shards[place])
            mine.append((again, self._owned.weights_again(layer)))
            for values, part in mine:
                whole[layer.within(values)] = part
        else:
            whole = self._owned.weights_N[layer.values.start : layer.values.stop]
        if layer.index not in self._buffers:
            self._buffers[layer.index] = self._parts_of_others(layer, whole)
        with operation(self._ctx, "weights", bucket=layer.index):
            messages = [
                self._ctx.irecv(buffer, source=source, tag=_WEIGHTS) for source, buffer in self._buffers[layer.index]
            ]
            for _, part in mine:
                others = [self._among[other] for other in self._others] if part.numel() else []
                messages += [self._ctx.isend(part, dest=other, tag=_WEIGHTS) for other in others]
        self._coming[layer.index] = messages

    def _parts_of_others(self, layer: Layer, whole: Tensor) -> list[tuple[Rank, Tensor]]:
        """Return where the parts of a layer arrive that others own, and from whom: at stage 3 two parts may come from one rank."""
        layout, found = self._owned.layout, []
        for other in self._others:
            parts = [layout.kept(layer, other)]
            parts += [layout.use_again(layer, layer.shards[other])[0]] if self._slots else []
            found += [(self._among[other], whole[layer.within(values)]) for values in parts if values]
        return found

    @torch.no_grad()
    def _share_memory(self, model: Model) -> list[Tensor]:
        """Let all even layers share one buffer for their parameters, and all odd layers another."""
        sizes = [max(len(layer.values) for layer in self.layers[slot::_SLOTS]) for slot in range(_SLOTS)]
        slots = [self._owned.weights_N.new_zeros(size) for size in sizes]
        parameters = list(model.parameters())
        for layer in self.layers:
            for fragment in self._owned.layout.fragments(layer.values):
                part = slots[layer.index % _SLOTS][layer.within(fragment.part.values)]
                parameters[fragment.part.parameter].data = part.view(fragment.shape)
        return slots
