"""Check that a run that resumes from a checkpoint continues its training, with the bits of an uninterrupted run.

The number of ranks, their sockets and the validation interval may change; values on which the bits depend may not, except the
device: a training may go on elsewhere, and the user is told that its bits are others from there.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from ttlaunch.diagnostics import Diagnostic, Severity, shown
from ttlaunch.diagnostics.count import counted
from ttlaunch.spec.located.schema import Section
from ttlaunch.spec.recipe.bits import Bits, deciders, marked
from ttlaunch.spec.recipe.config import LoadedConfig

_OF_ONE_WORKER = re.compile(r"optimizer\.weights\..+~[0-9]+of[0-9]+\Z")
_LONGEST_OPTIONS = 200
_LENGTH = "transformer_config.max_sequence_length"
_NEW_TRAINING = "`--set checkpoint_config.initial_weights=FILE` begins a new training with exported weights"


@dataclass(frozen=True)
class Change:
    """A key whose value differs from the checkpoint's."""

    key: str
    before: Any
    now: Any

    @property
    def sentence(self) -> str:
        return f"`{self.key}` was {_text(self.before)} and is {_text(self.now)}"


def check_same_training(
    manifest: Mapping[str, Any], loaded: LoadedConfig, *, text_sha256: str | None, fixed: Sequence[str] = ()
) -> list[Diagnostic]:
    """Report every reason why this configuration does not continue the checkpoint's training; else, what it continues otherwise.

    Args:
        manifest: The checkpoint's manifest.
        loaded: The configuration of the new run.
        text_sha256: The hash of the new run's training text.
        fixed: Further keys that must not change, because the bits of this recipe depend on them.
    """
    now = loaded.checked.model_dump(mode="json")
    model = type(loaded.checked)
    changes = list(find_changes(manifest["config"], now, model=model, fixed=fixed))
    shape = [change for change in changes if _is_in(change.key, marked(model, Bits.SHAPE))]
    elsewhere = [change for change in changes if _is_in(change.key, marked(model, Bits.DEVICE))]
    rest = [change for change in changes if change not in (*shape, *elsewhere)]
    found = list(_state_of_another_recipe(manifest, loaded, now, fixed=fixed))
    if shape:
        found.append(
            _diagnose("C041", "the checkpoint is of another model", shape, loaded=loaded, hints=_as_before(shape))
        )
    if rest:
        what = "the checkpoint is of another training"
        hints = (*_as_before(rest), _NEW_TRAINING)
        found.append(_diagnose("C040", what, rest, loaded=loaded, hints=hints))
    is_reported = any(_is_in(change.key, ("data_config",)) for change in changes)
    if manifest["text_sha256"] != text_sha256 and not is_reported:
        before, after = (str(value)[:12] for value in (manifest["text_sha256"], text_sha256))
        message = f"the checkpoint is of another training text: its SHA-256 was {before}… and is {after}…"
        found.append(Diagnostic("C040", message, loaded.label("training_config.data_path"), hints=(_NEW_TRAINING,)))
    steps = now["training_config"]["steps"]
    if not found and manifest["step"] > steps:
        message = f"the checkpoint is of step {manifest['step']}, but the run has {counted(steps, 'step')}"
        found.append(Diagnostic("C040", message, loaded.label("training_config.steps")))
    return found or [*_other_senders(manifest["config"], now, loaded), *_other_device(manifest, elsewhere, loaded)]


def check_same_model(manifest: Mapping[str, Any], loaded: LoadedConfig) -> list[Diagnostic]:
    """Report every key by which this configuration describes another model than the checkpoint's.

    How long the texts of a llama are is none of them: its positions need no weights.
    """
    now, model = loaded.checked.model_dump(mode="json"), type(loaded.checked)
    is_llama = now["training_config"]["model_type"] == "llama"
    shape = tuple(key for key in marked(model, Bits.SHAPE) if not (is_llama and key == _LENGTH))
    changes = [one for one in find_changes(manifest["config"], now, model=model, fixed=()) if _is_in(one.key, shape)]
    what = "the checkpoint is of another model"
    return [_diagnose("C041", what, changes, loaded=loaded, hints=_as_before(changes))] if changes else []


def _other_senders(before: Mapping[str, Any], now: Mapping[str, Any], loaded: LoadedConfig) -> Iterator[Diagnostic]:
    """Warn if gradients are compressed, because the bits then depend on the number of ranks."""
    old, new = dict(_flat(before)), dict(_flat(now))
    kind = new.get("compression_config.kind", "none")
    changed = [
        Change(key, old[key], new[key])
        for key in marked(type(loaded.checked), Bits.SENDERS)
        if key in old and key in new and old[key] != new[key]
    ]
    if kind == "none" or old.get("compression_config.kind") != kind or not changed:
        return
    kept = "the checkpoint keeps the compression error of each sender; a sender that it does not have begins with none"
    what = f"with `compression_config.kind: {kind}` bits depend on who sends"
    warning = _diagnose("C077", what, changed, loaded=loaded)
    yield replace(warning, notes=(*warning.notes, kept), severity=Severity.WARNING)


def _other_device(manifest: Mapping[str, Any], changes: list[Change], loaded: LoadedConfig) -> Iterator[Diagnostic]:
    """Warn if the checkpoint is of another device, or of other kernels."""
    if not changes:
        return
    what = "the checkpoint is of another device or other kernels, which round otherwise"
    warning = _diagnose("C078", what, changes, loaded=loaded, hints=_as_before(changes))
    kept = f"up to step {manifest['step']} the bits are those of the checkpoint; from there they are those of no run that kept its device"
    yield replace(warning, notes=(*warning.notes, kept), severity=Severity.WARNING)


def _state_of_another_recipe(
    manifest: Mapping[str, Any], loaded: LoadedConfig, now: Mapping[str, Any], *, fixed: Sequence[str]
) -> Iterator[Diagnostic]:
    """Report state, besides weights and moments, that the checkpoint lacks or that only its own recipe can use."""
    before, values = dict(_flat(manifest["config"])), dict(_flat(now))
    name = shown(manifest.get("recipe"))
    missing = [key for key in fixed if key not in before and values.get(key) is not None]
    is_reported = any(key in before for key in fixed if not _is_in(key, ("multihost_config",)))
    if missing:
        message = f"the checkpoint is of `{name}`, which has no `{missing[0]}` and keeps nothing of it"
        do_without = (f"`--set {missing[0]}=null` continues without it",) if _may_be_null(loaded, missing[0]) else ()
        yield Diagnostic("C040", message, loaded.label(missing[0]), hints=(*do_without, _NEW_TRAINING))
    elif not is_reported and any(_OF_ONE_WORKER.match(tensor) for tensor in _tensors(manifest)):
        message = f"the checkpoint is of `{name}`, whose workers have different weights; only that recipe can resume from them"
        yield Diagnostic("C040", message, hints=(f"`ttlaunch run {name} --resume …`", _NEW_TRAINING))


def _may_be_null(loaded: LoadedConfig, key: str) -> bool:
    section, _, name = key.partition(".")
    field = type(getattr(loaded.checked, section)).model_fields[name]
    return type(None) in get_args(field.annotation)


def _tensors(manifest: Mapping[str, Any]) -> Iterator[str]:
    for entry in manifest.get("files", {}).values():
        yield from entry.get("tensors", ())


def find_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], *, model: type[Section], fixed: Sequence[str]
) -> Iterator[Change]:
    old, new = dict(_flat(before)), dict(_flat(now))
    is_constant = old.get("scheduler_config.type") == new.get("scheduler_config.type") == "constant"
    unread = [key for key, decider in deciders(model) if new.get(decider.key) != decider.value]
    # With any other schedule of the learning rate, each step depends on the number of steps.
    length = marked(model, Bits.LENGTH) if is_constant else ()
    free = (*marked(model, Bits.FREE), *length, *unread)
    for key in sorted(old.keys() | new.keys()):
        if key in old and key in new and old[key] != new[key] and (key in fixed or not _is_in(key, free)):
            yield Change(key, old[key], new[key])


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _is_in(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _diagnose(
    code: str, what: str, changes: list[Change], *, loaded: LoadedConfig, hints: tuple[str, ...] = ()
) -> Diagnostic:
    placed = [(one, loaded.label(one.key, f"{_text(one.before)} in the checkpoint")) for one in changes]
    labels = [label for _, label in placed if label]
    unseen = [change.sentence for change, label in placed[1:] if label is None]
    primary = labels[0] if labels else None
    message = f"{what}: {changes[0].sentence}"
    return Diagnostic(code, message, primary, tuple(labels[1:]), notes=tuple(unseen), hints=hints)


def _as_before(changes: Sequence[Change]) -> tuple[str, ...]:
    """Suggest the options that give changed keys the values of the checkpoint; none if these are many or long."""
    texts = [one.before if isinstance(one.before, str) else json.dumps(one.before) for one in changes]
    options = " ".join(f"--set {shlex.quote(f'{one.key}={text}')}" for one, text in zip(changes, texts, strict=True))
    fits = len(options) <= _LONGEST_OPTIONS and options.isprintable() and all(texts)
    return (f"`{options}` continues the checkpoint's training",) if fits else ()


def _text(value: Any) -> str:
    """Return a value in the notation of a training file."""
    return shown(value if isinstance(value, str) else json.dumps(value), longest=80)
