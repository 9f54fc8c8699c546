"""What a serving run takes of memory and sends, predicted from a checkpoint's sizes before anything starts."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ttlaunch.app.serve import section_of, weights_of
from ttlaunch.diagnostics import Blame, Diagnostic, LaunchError, counted, render_size
from ttlaunch.quick_dataclass import dataclass

if TYPE_CHECKING:
    from ttlaunch.app.prepare_run import PreparedRun
    from ttlaunch.app.run_spec import RunSpec
    from ttlaunch.hosts.doctor.facts import HostFacts
    from ttlaunch.spec.recipe.sections import TrainingFile

_FLOAT, _HALF = 4, 2
_EMBEDDING = "embedding.token.weight"
_WHOLE = (_EMBEDDING, "embedding.position.", "norm.")
"""What the names of parameters contain that every rank has as a whole, where ranks share matrices by columns."""
_PADDED_ROWS = (4, 16)
"""Shares gather the rows of a step after they are padded; stages send them before. To how many depends on a host's CPU."""


@dataclass(frozen=True)
class ServedMemory:
    """What all ranks of a serving run have together, in bytes.

    Attributes:
        weights: Weights. Ranks that share matrices by columns each have norms and embedding as a whole.
        cache: Keys and values of all texts.
        transposed: At most, what ranks keep of transposed copies of their matrices; those on CPUs without AVX-512 keep nothing.
        slots: Texts at once.
        context: Tokens of each.
        sent_by_row: What ranks send each other for a row of a step: a token of a text.
        is_padded: Whether a step sends a number of rows that the bits of training need, however few tokens it has.
    """

    weights: int
    cache: int
    transposed: int
    slots: int
    context: int
    sent_by_row: int
    is_padded: bool

    @property
    def most(self) -> int:
        """Return what all ranks take at most."""
        return self.weights + self.cache + self.transposed

    def described(self, *, follows: bool = False) -> list[str]:
        """Return lines for the plan; `follows`: newer weights are taken in the place of these."""
        texts = f"{counted(self.slots, 'text')} of {counted(self.context, 'token')}"
        lines = [f"memory  weights {render_size(self.weights)}, keys and values of {texts} {render_size(self.cache)}"]
        if self.transposed:
            lines.append(
                f"        transposed copies of matrices {render_size(self.transposed)} where the CPU has AVX-512"
            )
        if follows:
            both = render_size(2 * self.weights)
            lines.append(f"disk    weights {both} at most: the old ones stay until their last text has ended")
        if self.sent_by_row:
            few, more = _PADDED_ROWS
            least = f", for {few} a step at least, or {more} where the CPU has AVX-512" if self.is_padded else ""
            lines.append(f"sends   {render_size(self.sent_by_row)} for each token{least}")
        return lines


def predict_memory(spec: "RunSpec", *, ranks: int | None = None) -> ServedMemory:
    """Predict what a specification made by `find_served` takes.

    Args:
        spec: The specification.
        ranks: The number of ranks, if hosts were lost since the specification was made; None for that of the specification.

    Raises:
        LaunchError: The checkpoint cannot be read any more.
    """
    from ttlaunch.spec.recipe.sections import TrainingFile
    from ttlaunch.spec.recipe.serving import cache_bytes, gathered_of_row

    names = ("training_config", "transformer_config", "device_config")
    cfg = TrainingFile.model_validate({name: section_of(spec, name) for name in names})
    served, sizes = section_of(spec, "serve_config"), cfg.transformer_config
    context, slots = served["max_context"] or sizes.max_sequence_length, served["max_streams"]
    shares = served.get("shares", 0)
    ranks = ranks or 1 + shares + served.get("stages", 0)
    found = {name: _FLOAT * math.prod(tensor.shape) for name, tensor in weights_of(spec).items()}
    is_shared = shares > 0 and ranks > 1
    width, logits = sizes.embedding_dim * _FLOAT, served["vocabulary"] * _FLOAT
    if is_shared:  # each rank sends its columns of what a block gathers, and of the logits, to every other one
        value = _FLOAT if cfg.training_config.precision == "fp32" else _HALF
        sent = (ranks - 1) * value * (gathered_of_row(cfg) + served["vocabulary"])
    else:
        sent = (ranks - 1) * width + ((width if sizes.tie_embeddings else logits) if ranks > 1 else 0)
    cache = cache_bytes(cfg, slots=slots, context=context, shares=ranks if is_shared else 1)
    is_padded = is_shared and served["exact"] != "off"
    weights = weight_bytes(found, ranks=ranks, is_shared=is_shared, is_tied=sizes.tie_embeddings)
    copies = 0 if is_shared or served["exact"] == "off" else sum(transposed_bytes(cfg, found, stages=ranks))
    return ServedMemory(weights, cache, copies, slots, context, sent, is_padded)


def transposed_bytes(cfg: "TrainingFile", sizes: Mapping[str, int], *, stages: int) -> Iterator[int]:
    """Yield what each stage of a model keeps of transposed copies of its matrices at most, in bytes.

    Args:
        cfg: The model, its precision and the threads of a rank.
        sizes: The bytes of each parameter, by name.
        stages: Ranks that each have some blocks.
    """
    from ttlaunch.spec.recipe.serving import MOST_TRANSPOSED_BYTES, blocks_of_stages

    device, model = cfg.device_config, cfg.transformer_config
    if cfg.training_config.precision != "fp32" or device.device == "cuda" or device.threads_per_rank > 1:
        return
    vocabulary = sizes[_EMBEDDING] // (_FLOAT * model.embedding_dim)
    head = _EMBEDDING if model.tie_embeddings else "head.output.weight"
    for place, blocks in enumerate(blocks_of_stages(cfg, vocabulary=vocabulary, count=stages)):
        has_head = place == (0 if model.tie_embeddings else stages - 1)
        matrices = [sizes[head]] if has_head else []
        for name, size in sizes.items():
            is_here = any(name.startswith(f"blocks.{block}.") for block in blocks)
            if name.endswith(".weight") and ((is_here and "norm" not in name) or (place == 0 and ".context." in name)):
                matrices.append(size)
        copies = sum(matrices)
        yield copies if copies <= MOST_TRANSPOSED_BYTES else 0


def weight_bytes(sizes: Mapping[str, int], *, ranks: int, is_shared: bool, is_tied: bool) -> int:
    """Return what all ranks have of a model's weights together, in bytes.

    Args:
        sizes: The bytes of each parameter, by name.
        ranks: Ranks that share the model.
        is_shared: Whether they share its matrices by columns; otherwise each has some blocks.
        is_tied: Whether the head computes with the embedding's matrix: the first stage does, and shares copy their columns of it.
    """
    everywhere = sum(size for name, size in sizes.items() if any(part in name for part in _WHOLE))
    copies = sizes[_EMBEDDING] if is_tied and is_shared else 0
    return sum(sizes.values()) + (everywhere * (ranks - 1) if is_shared else 0) + copies


def check_hosts(prepared: "PreparedRun", facts: "Mapping[str, HostFacts]") -> list[Diagnostic]:
    """Report hosts that have no room for the ranks of a run that reads the weights of a model and trains nothing.

    Raises:
        LaunchError: The checkpoint cannot be read any more.
    """
    choice, rows = prepared.description.choice, prepared.plan.ranks
    if choice is None or not choice.recipe.only_weights:
        return []
    available = {host: known.memory.available_bytes for host, known in facts.items() if known.memory is not None}
    memory = predict_memory(prepared.request, ranks=len(rows))
    return list(too_large_for(memory, Counter(str(row.host) for row in rows), available))


def too_large_for(memory: ServedMemory, ranks: Mapping[str, int], available: Mapping[str, int]) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each host without room for its part of weights and cache, which is that of its ranks.

    Args:
        memory: What all ranks have together.
        ranks: The number of ranks on each host.
        available: The memory that is left there, in bytes, where it is known.
    """
    for host, count in ranks.items():
        needed = memory.most * count // sum(ranks.values())
        if needed > (left := available.get(host, needed)):
            ranks_there = f"its {counted(count, 'rank')} need{'s' if count == 1 else ''}"
            message = f"{host} has {render_size(left)} of memory left, and {ranks_there} {render_size(needed)}"
            hints = (f"more hosts, or `--max-streams {max(1, memory.slots // 2)}`: {memory.described()[0]}",)
            yield Diagnostic("P009", message, hints=hints, blame=Blame.COMMAND_LINE)


def refuse_too_large(memory: ServedMemory) -> None:
    """Refuse what this machine has no room for.

    Raises:
        LaunchError: Weights, cache and transposed copies together exceed the memory that is available.
    """
    import psutil

    available, needed = psutil.virtual_memory().available, memory.most
    if needed <= available:
        return
    message = f"the model needs {render_size(needed)}, and this machine has {render_size(available)} of memory left"
    hints = (f"`--max-streams {max(1, memory.slots // 2)}`, or a smaller `--max-context`: {memory.described()[0]}",)
    raise LaunchError([Diagnostic("P009", message, hints=hints, blame=Blame.COMMAND_LINE)])
