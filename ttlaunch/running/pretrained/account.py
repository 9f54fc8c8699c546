"""Account for every tensor of a model that comes in: which are missing, unknown, or of another shape or type."""

from collections.abc import Iterator, Mapping

from ttlaunch.diagnostics import closest, shown
from ttlaunch.running.checkpoints.tensor_file import AnyTensor

TYPES = ("F32", "BF16", "F16")
"""Types of values with which a training can begin."""
_MOST_COMPARED = 200


def account_for(found: Mapping[str, AnyTensor], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield what is wrong with each tensor that the model lacks, does not know, or has in another shape or type.

    Args:
        found: The stored tensors by name.
        shapes: The shape of each tensor that the model has, by name.
    """
    unknown = sorted(found.keys() - shapes.keys())
    missing = sorted(shapes.keys() - found.keys())
    for name in missing:
        yield f"tensor `{name}` is missing" + _nearest(name, unknown, "; the file has")
    for name in unknown:
        yield f"tensor `{shown(name)}` is unknown" + _nearest(name, missing, "; the model lacks")
    for name, shape in shapes.items():
        if name not in found:
            continue
        if found[name].shape != shape:
            yield f"tensor `{name}` has the shape {list(found[name].shape)}, and the configuration says {list(shape)}"
        if found[name].dtype not in TYPES:
            yield f"tensor `{name}` has values of type {found[name].dtype}, and only {', '.join(TYPES)} are taken"


def _nearest(name: str, others: list[str], words: str) -> str:
    """Return the name among others that was probably meant, in words; of very many none is looked for."""
    best = closest(name, others) if len(others) <= _MOST_COMPARED else None
    return f"{words} `{shown(best)}`" if best else ""
