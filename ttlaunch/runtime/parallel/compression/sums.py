"""The sum over ranks of one vector each, where every rank encodes its vector before it sends it.

    payload r = encode(vector of rank r)                                    each rank
    sum       = decode(payload 0) + decode(payload 1) + ...                 all ranks, in this order

Every rank decodes all payloads, its own included, and adds them in the same order: so all have the same bits.

Shapes: N = values of the model's flat vector. n = ranks, P = bytes of a payload.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ttlaunch.runtime.comm.protocol import Pending
from ttlaunch.runtime.comm.tree_exchange import next_around
from ttlaunch.runtime.context import RankContext
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.compression.codec import Codec, build_codec
from ttlaunch.runtime.parallel.compression.powersgd import PowerSgd, matrices_in
from ttlaunch.runtime.telemetry.traffic_counter import operation
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import CompressionConfig

_PAYLOAD = 30_050


class CompressedSum:
    """Adds up vectors that have the layout of a model's flat vectors.

    Cost of a sum: `(n - 1) * P` bytes each way, in `n - 1` messages. Buffers for n payloads, one vector, and the codec's
    state.
    Order: that of `among`; the same bits on every run with these ranks.
    Source: an all-gather of compressed gradients, as in H. Xu et al., "GRACE: A Compressed Communication Framework for
        Distributed Machine Learning", ICDCS 2021.

    Attributes:
        codec: The codec that this rank encodes with.
    """

    def __init__(self, model: Model, *, cfg: CompressionConfig, ctx: RankContext, among: Sequence[Rank]) -> None:
        """Build the codec; nothing is sent.

        Args:
            model: The model whose matrices `powersgd` factors.
            cfg: How to compress.
            ctx: The context of this rank.
            among: The ranks whose vectors are added, in this order.
        """
        self._ctx, self._among, self._place = ctx, among, among.index(ctx.rank)
        count, device = len(model.weights_N), model.weights_N.device
        parameters = list(model.parameters())
        starts = [int(parameter.storage_offset()) for parameter in parameters]
        matrices = matrices_in([parameter.shape for parameter in parameters], starts)
        self.codec: Codec = build_codec(cfg, count, matrices=matrices, device=device)
        if cfg.kind == "powersgd":  # the formula of the traffic needs the sizes of the factors
            factored = PowerSgd(count, rank=cfg.rank, matrices=matrices).factored
            sides = sum(matrix.rows + matrix.columns for matrix in factored)
            ctx.traffic.note(factored_sides=sides, factored_values=sum(matrix.size for matrix in factored))
        size = self.codec.payload_bytes(count)
        self._payloads = [torch.empty(size, dtype=torch.uint8, device=device) for _ in among]
        self._room_N = torch.empty_like(model.weights_N)

    def begin(self, values_N: Tensor, *, name: str) -> list[Pending]:
        """Encode this rank's vector, and begin to send it and to receive the other ranks' vectors; `finish` adds them.

        Args:
            values_N: Shape `(N,)`, float32, contiguous; only read. Every rank of `among` must call.
            name: The operation's name, in reports.

        Returns:
            The transfers; wait for all of them before `finish`.

        Cost: `n - 1` messages of P bytes (uint8) each way.
        """
        self._payloads[self._place] = self.codec.encode(values_N)
        return swap(self._ctx, self._payloads, name=name, tag=_PAYLOAD, among=self._among)

    @torch.no_grad()
    def finish(self, out_N: Tensor) -> None:
        """Overwrite a vector with the sum of all payloads that `begin` exchanged."""
        self.codec.decode(self._payloads[0], out_N)
        for payload in self._payloads[1:]:
            self.codec.decode(payload, self._room_N)
            out_N.add_(self._room_N)


def swap(ctx: RankContext, buffers: Sequence[Tensor], *, name: str, tag: int, among: Sequence[Rank]) -> list[Pending]:
    """Begin to send this rank's buffer to all other ranks, and to receive theirs.

    Args:
        ctx: Every rank of `among` must call, in the same order as its other collectives with this tag.
        buffers: One for each rank of `among`, contiguous; this rank's own is sent, the others are filled.
            Sizes and dtypes are equal on all ranks.
        name: The operation's name, in reports.
        tag: The tag of all these messages.
        among: The ranks.

    Returns:
        The transfers; the buffers must not be used before all have been waited for.

    Cost: `n - 1` messages each way, of one buffer's bytes.
    Order: every rank begins with the next one around; nothing is added up.
    """
    place = among.index(ctx.rank)
    others = next_around(place, len(among))
    with operation(ctx, name):
        pending = [ctx.irecv(buffers[other], source=among[other], tag=tag) for other in others]
        return pending + [ctx.isend(buffers[place], dest=among[other], tag=tag) for other in others]
