"""The norm of a gradient whose parts are on several ranks, with the same bits as on one rank."""

from collections.abc import Sequence

import torch

from ttlaunch.runtime.comm.protocol import Communicator
from ttlaunch.runtime.parallel.zero.owned import OwnedParameters
from ttlaunch.runtime.telemetry.traffic_counter import TrafficCounter, operation
from ttlaunch.runtime.training.norms import join_sums
from ttlaunch.runtime.training.optimizers import norms_of_layers
from ttlaunch.runtime.world import Rank

_TAG = 30_033


class SharedNorms:
    """Squared norms of all parameters' gradients, from the sums over the shards that ranks own.

    Cost: one message to each other rank, with 8 bytes for each complete node that this rank has of the trees over
        parameters: one node for a whole parameter, and a few for a part of one; at stage 0 none.
    Order: that of `training/norms.py`.
    """

    def __init__(
        self,
        owned: OwnedParameters,
        *,
        ctx: Communicator,
        among: Sequence[Rank],
        traffic: TrafficCounter | None = None,
        ledger: TrafficCounter | None = None,
    ) -> None:
        """Plan the messages, and note in the traffic counter how many nodes this rank has; nothing is sent.

        `ledger` is the former name of `traffic`, which trainers of users may still use.
        """
        self._ctx, self._among, self._owned = ctx, among, owned
        self._own = owned.squared_norms()
        own_nodes = [node for norms in self._own for node in norms.nodes]
        self._is_shared = owned.shares_state
        count = len(among) if self._is_shared else 1
        self._place = owned.place if self._is_shared else 0
        self._nodes = [owned.nodes_of(place) if place != self._place else own_nodes for place in range(count)]
        self._buffers = [torch.zeros(len(nodes), dtype=torch.float64) for nodes in self._nodes]
        self._squares: dict[str, float] = {}
        if (counter := ledger if traffic is None else traffic) is not None:
            places = self._nodes if self._is_shared else [own_nodes] * len(among)
            counter.note_shares(owned.place, norm_nodes=[len(nodes) for nodes in places])

    def squares(self) -> dict[str, float]:
        """Return the squared norm of each parameter's gradient by name, in the model's order, without the loss scale.

        Every rank of `among` must call, once a step, after `ScatteredGradients.finish`.

        Cost: one message to each other rank, of 8 bytes (float64) for each node of this rank; at stage 0 none.
        """
        mine = self._buffers[self._place]
        mine.copy_(
            torch.tensor([total for norms in self._own for total in norms.sums(self._owned.grads_N)], dtype=mine.dtype)
        )
        pending = []
        with operation(self._ctx, "squared_norms"):
            for other, buffer in enumerate(self._buffers):
                if other != self._place and len(buffer):
                    pending.append(self._ctx.irecv(buffer, source=self._among[other], tag=_TAG))
                if other != self._place and len(mine):
                    pending.append(self._ctx.isend(mine, dest=self._among[other], tag=_TAG))
        for message in pending:
            message.wait()
        found = [
            pair
            for nodes, buffer in zip(self._nodes, self._buffers, strict=True)
            for pair in zip(nodes, buffer.tolist(), strict=True)
        ]
        found.sort(key=lambda pair: (pair[0][0], pair[0][1].start))
        scale = self._owned.loss_scaler.scale
        self._squares = {self._owned.layout.name(place): total / scale**2 for place, total in join_sums(found).items()}
        return self._squares

    def layer_norms(self) -> dict[str, float]:
        """Return the norm of the gradient of each layer of the whole model, from the last `squares`."""
        return norms_of_layers(self._squares)
