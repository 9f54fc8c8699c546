"""Where a training's values come from: the file that a specification names, standard input, or the recipe's own file."""

import sys
from pathlib import Path

from ttlaunch.app.run_spec import RunSpec, path_in, short_name
from ttlaunch.diagnostics import Blame
from ttlaunch.quick_dataclass import dataclass
from ttlaunch.spec.named_folders import NamedFolder
from ttlaunch.spec.recipe.config import LoadedConfig, load_config
from ttlaunch.spec.recipe.declare import Recipe


@dataclass(frozen=True)
class _Origin:
    """Where values come from; nowhere if all of them are defaults."""

    path: Path | None = None
    name: str | None = None
    standard_input: bytes | None = None


def read_training(
    request: RunSpec, recipe: Recipe, found: NamedFolder, *, working_folder: Path | None = None
) -> LoadedConfig:
    """Read the training file of a specification, with the values of `--set`."""
    origin = _origin_of(request, found.train_file, working_folder or Path.cwd())
    return load_config(
        recipe,
        origin.path,
        name=origin.name,
        standard_input=origin.standard_input,
        overrides=request.overrides,
        blame=Blame.DESCRIPTION if request.config_file is None else Blame.COMMAND_LINE,
    )


def _origin_of(request: RunSpec, default: Path, working_folder: Path) -> _Origin:
    if request.config_file == "-":
        return _Origin(name="standard input", standard_input=sys.stdin.buffer.read())
    if request.config_file is not None:
        return _Origin(path_in(request.config_file, working_folder), request.config_file)
    return _Origin(default, short_name(default, working_folder)) if default.is_file() else _Origin()
