"""The keys that recipes share, by which a training file is checked without a recipe; any recipe may add its own."""

from collections.abc import Sequence
from dataclasses import replace

from pydantic.fields import FieldInfo

from ttlaunch.diagnostics import Diagnostic, KeyMistake, Severity, Span
from ttlaunch.diagnostics.suggest import closest
from ttlaunch.spec.recipe.config import LoadedConfig, check_config, keys_of, load_config
from ttlaunch.spec.recipe.declare import Layout, Recipe
from ttlaunch.spec.recipe.sections import TrainingFile

_SUFFIX = "_config"
_SHARED = Recipe(
    summary="What every recipe that trains a model shares.",
    config=TrainingFile,
    layouts=[Layout("one process", rank=1)],
)


def settable_keys(recipe: Recipe | None) -> dict[str, FieldInfo]:
    """Return the field of each key that `--set` may change; without a recipe, of those that recipes share."""
    chosen = recipe or _SHARED
    unread = tuple(f"{key}." for key in chosen.unread)
    # A section that may be missing has a value of its own: null.
    keys = ((key, field) for key, field, section in keys_of(chosen.config) if section is None or field.default is None)
    return {key: field for key, field in keys if not f"{key}.".startswith(unread)}


def check_training_file(
    data: bytes, *, name: str, recipe: Recipe | None, overrides: Sequence[str] = ()
) -> tuple[LoadedConfig, list[Diagnostic]]:
    """Check a training file by itself.

    Args:
        data: The bytes of the file.
        name: The name of the file in messages.
        recipe: The recipe that the file is for. Without one, only the shared sections are checked, and a section with
            another name gives a warning.
        overrides: `KEY=VALUE` each, merged into the file.

    Returns:
        The configuration, and all diagnostics.
    """
    chosen = recipe or _SHARED
    loaded = load_config(chosen, None, name=name, standard_input=data, overrides=overrides)
    found = [*loaded.diagnostics, *check_config(chosen, loaded, chosen.layouts[-1])]
    return loaded, found if recipe else [_own_section(diagnostic, loaded) for diagnostic in found]


def _own_section(diagnostic: Diagnostic, loaded: LoadedConfig) -> Diagnostic:
    """Turn the error for an unknown section into a warning, unless it resembles a shared one: a recipe may have it."""
    key = next((key for key, span in loaded.root.keys.items() if _is_at(diagnostic, span)), 0)
    if diagnostic.key_mistake is not KeyMistake.UNKNOWN or not isinstance(key, str):
        return diagnostic
    if closest(key.removesuffix(_SUFFIX), [name.removesuffix(_SUFFIX) for name in TrainingFile.model_fields]):
        return diagnostic
    hint = "`--recipe NAME` checks the sections that a recipe adds"
    return replace(diagnostic, severity=Severity.WARNING, hints=(hint,))


def _is_at(diagnostic: Diagnostic, span: Span) -> bool:
    return diagnostic.primary is not None and diagnostic.primary.span == span
