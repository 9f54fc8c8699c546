"""The aggregator for workers that split the model: it receives shares of gradients, and passes on the whole gradient.

So the optimizer updates whole matrices as if the model were not split, and neither the clipping norm nor checkpoints differ.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ttlaunch.runtime.comm.protocol import Communicator
from ttlaunch.runtime.model.flat import FlatParameters
from ttlaunch.runtime.model.model import Model
from ttlaunch.runtime.parallel.gradients.bucket_messages import send_bucket_size
from ttlaunch.runtime.parallel.gradients.buckets import BYTES_PER_MEGABYTE, Bucket, cut_buckets
from ttlaunch.runtime.parallel.tensor.share import ModelShare
from ttlaunch.runtime.parallel.tiers.gradient_aggregator import GradientAggregator
from ttlaunch.runtime.world import Rank
from ttlaunch.spec.recipe.sections import TrainingFile


class SplitGradientAggregator:
    """Has the methods of `GradientAggregator`, and one such aggregator for each share of the model.

    Gradients of parameters that all ranks have whole, such as norms', arrive with every share, with the same bits. Those
    of the first share are used.

    Cost of a step: that of the aggregators of its shares, and two copies of gradients and weights. Memory for all
        shares beside the whole model. The mean is complete when all shares have arrived, and weights are sent when all
        are updated.
    Order: that of `GradientAggregator`, share by share: the same bits for any number of workers.

    Attributes:
        buckets: The buckets of the whole model.
    """

    def __init__(
        self,
        cfg: TrainingFile,
        model: Model,
        *,
        ctx: Communicator,
        workers: Sequence[Mapping[Rank, range]],
        followers: Iterable[Rank] = (),
    ) -> None:
        """Make a model of each share; nothing is sent.

        Args:
            cfg: The training configuration.
            model: The whole model.
            ctx: The communicator of this rank.
            workers: The ranks that send each share, as for `GradientAggregator`.
            followers: Ranks that need to know the buckets of the whole model.
        """
        self._ctx = ctx
        self._model = model
        self._followers = tuple(followers)
        self._shares = [
            _share_of(cfg, model, ModelShare(place, len(workers)), device=model.weights_N.device)
            for place in range(len(workers))
        ]
        megabytes = cfg.multihost_config.bucket_megabytes
        self._aggregators = [
            GradientAggregator(
                share.parameters(), ctx=ctx, workers=blocks, bucket_megabytes=megabytes, shared=model.loss_scaler
            )
            for share, blocks in zip(self._shares, workers, strict=True)
        ]
        size = model.weights_N.nbytes if megabytes is None else int(megabytes * BYTES_PER_MEGABYTE)
        self._bucket_bytes = max(1, size)
        self.buckets = cut_buckets(FlatParameters(model.parameters()).starts, bucket_bytes=self._bucket_bytes)
        self._is_settled = False
        self._updated: set[int] = set()

    def send_first_weights(self) -> None:
        """Send every worker rank its share of the weights that training begins with.

        Cost: one message of a share's bytes (float32) to each worker rank of the first rows.
        """
        self._split_weights()
        for aggregator in self._aggregators:
            aggregator.send_first_weights()

    def begin_step(self) -> tuple[float, int]:
        """Wait until every worker has sent its loss, as `GradientAggregator` does; ranks that split a model send the same one.

        Raises:
            CommunicationError: A worker sends the sums of other micro-batches than its block.

        Cost: that of `GradientAggregator.begin_step` for each share; before the first step 16 bytes to each follower.
        """
        if not self._is_settled:
            send_bucket_size(self._ctx, torch.tensor([self._bucket_bytes, True]), self._followers)
            self._is_settled = True
        self._updated.clear()
        for aggregator in self._aggregators:  # before any loss, since the ranks of a row compute it together
            aggregator.agree_on_buckets()
        first, *_ = [aggregator.receive_losses() for aggregator in self._aggregators]
        return first

    def mean_gradients(self) -> Iterator[Bucket]:
        """Yield each bucket of the whole model, after the gradients of all shares have been joined.

        Cost: that of `GradientAggregator.mean_gradients` for each share.
        """
        for aggregator in self._aggregators:
            deque(aggregator.mean_gradients(), maxlen=0)  # leaves each bucket in the gradients of its share
        self._model.take_gradients()
        for share in self._shares:
            share.take_gradients()
        self._join_gradients()
        yield from self.buckets

    def send_weights(self, bucket: Bucket) -> None:
        """Note that a bucket's weights are final; after the last bucket, send all shares of the weights.

        Cost: after the last bucket that of `GradientAggregator.send_weights` for all buckets of each share.
        """
        self._updated.add(bucket.index)
        if len(self._updated) < len(self.buckets):
            return
        self._split_weights()
        for aggregator in self._aggregators:
            for part in reversed(aggregator.buckets):
                aggregator.send_weights(part)

    def end_step(self) -> None:
        """Return when all sends of weights are complete."""
        for aggregator in self._aggregators:
            aggregator.end_step()

    @torch.no_grad()
    def _join_gradients(self) -> None:
        whole = _gradients(self._model)
        for place, share in enumerate(self._shares):
            for name, gradient in _gradients(share).items():
                if name in share.splits:
                    share.splits[name].paste(gradient, into=whole[name])
                elif not place:
                    whole[name].copy_(gradient)

    @torch.no_grad()
    def _split_weights(self) -> None:
        whole = dict(nn.Module.named_parameters(self._model))
        for share in self._shares:
            for name, parameter in nn.Module.named_parameters(share):
                split = share.splits.get(name)
                parameter.copy_(whole[name] if split is None else split.cut(whole[name]))


def _share_of(cfg: TrainingFile, model: Model, share: ModelShare, *, device: torch.device) -> Model:
    blocks = range(model.num_blocks)
    part = Model(cfg, vocabulary=model.vocabulary, blocks=blocks, has_embedding=True, has_head=True, layers=share)
    part.flatten(device)
    return part


def _gradients(model: Model) -> dict[str, Tensor]:
    """Return the gradients by name, also that of the second use of a shared matrix, which has a name of its own."""
    named = nn.Module.named_parameters(model)
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}
