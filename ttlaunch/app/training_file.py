"""Where a training's values come from: the file that a specification names, standard input, or the recipe's own file."""

import sys
from pathlib import Path

from ttlaunch.app.run_spec import RunSpec, path_in, short_name
from ttlaunch.diagnostics import Blame
from ttlaunch.spec.named_folders import NamedFolder
from ttlaunch.spec.recipe.config import LoadedConfig, load_config
from ttlaunch.spec.recipe.declare import Recipe


def read_training(
    request: RunSpec, recipe: Recipe, found: NamedFolder, *, working_folder: Path | None = None
) -> LoadedConfig:
    """Read the training file of a specification, with the values of `--set`."""
    path, name, standard_input = _config_source(request, found.train_file, working_folder or Path.cwd())
    blame = Blame.DESCRIPTION if request.config_file is None else Blame.COMMAND_LINE
    return load_config(recipe, path, name=name, standard_input=standard_input, overrides=request.overrides, blame=blame)


def _config_source(
    request: RunSpec, default: Path, working_folder: Path
) -> tuple[Path | None, str | None, bytes | None]:
    if request.config_file == "-":
        return None, "standard input", sys.stdin.buffer.read()
    if request.config_file is not None:
        return path_in(request.config_file, working_folder), request.config_file, None
    return (default, short_name(default, working_folder), None) if default.is_file() else (None, None, None)
