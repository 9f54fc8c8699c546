"""`ttlaunch weights`: export the weights of a checkpoint as one safetensors file or as a folder, or list them.

`checkpoint_config.initial_weights` reads such a file. `show` lists the tensors of a checkpoint or of such a file.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ttlaunch.cli.console import print_json, print_lines, show_diagnostics, tabbed
from ttlaunch.cli.options import RunsDir
from ttlaunch.diagnostics import Format, LaunchError, counted, file_error, usage_error

if TYPE_CHECKING:
    from ttlaunch.running.checkpoints.tensor_file import FiledTensor

app = typer.Typer(help="Show and export weights.", no_args_is_help=True)

EXAMPLES = """\
[bold]ttlaunch weights export latest weights.safetensors[/bold]   the weights of the newest run with a checkpoint

[bold]ttlaunch weights export latest average.safetensors --average[/bold]   the averaged weights, if the recipe keeps them

[bold]ttlaunch weights export latest model --as hf[/bold]   a folder that transformers loads, with configuration and tokenizer

[bold]ttlaunch run hierarchical_parallel --set checkpoint_config.initial_weights=weights.safetensors[/bold]   start training from them
"""

SHOW_EXAMPLES = """\
[bold]ttlaunch weights show latest[/bold]   the weights of the newest checkpoint

[bold]ttlaunch weights show weights.safetensors[/bold]   those of a file, to compare names and shapes
"""


@app.command(epilog=EXAMPLES)
def export(
    run: Annotated[str, typer.Argument(metavar="latest|RUN|PATH", help="A run, or one of its checkpoints.")],
    file: Annotated[str, typer.Argument(metavar="TO", help="Output file or folder, which must not exist.")],
    *,
    layout: Annotated[
        Literal["plain", "hf"],
        typer.Option(
            "--as",
            help="plain: a safetensors file, under the model's parameter names; hf: a folder that "
            "AutoModelForCausalLM.from_pretrained of transformers loads, with the tokenizer.",
        ),
    ] = "plain",
    average: Annotated[
        bool, typer.Option("--average", help="Export the average over training, if the recipe keeps one.")
    ] = False,
    runs_dir: RunsDir = Path("runs"),
    form: Annotated[
        Format, typer.Option("--format", help="Format of error messages: full, concise, json or github.")
    ] = Format.FULL,
) -> None:
    """Write the weights of the newest complete checkpoint to a safetensors file, or to a folder for other libraries."""
    from ttlaunch.running.checkpoints.tensor_file import write_tensors

    if not file.strip():
        raise usage_error("an empty text names no file to write")
    if os.path.lexists(file):  # never raises, whatever was typed
        raise usage_error(f"{file} already exists", "name another file")
    if layout == "hf":
        _export_folder(run, file, runs_dir=runs_dir, form=form, averaged=average)
        return
    step, weights = _of_checkpoint(run, runs_dir=runs_dir, form=form, averaged=average)
    if not weights:
        hints = ("`sync_ps` keeps one with `--set sync_ps_config.polyak_interval=10`",)
        raise usage_error(f"the checkpoint of step {step} has no average of the weights", *hints)
    try:
        write_tensors(Path(file), weights)
    except OSError as error:
        source = next((one.path for one in weights.values() if str(one.path) == error.filename), None)
        raise file_error(source or file, error, verb="read" if source else "written") from error
    if form is Format.JSON:
        print_json({"file": file, "step": step, "tensors": len(weights)}, schema="weights-export")
    else:
        print_lines([f"wrote {counted(len(weights), 'tensor')} of step {step} to {file}"])


def _export_folder(run: str, folder: str, *, runs_dir: Path, form: Format, averaged: bool) -> None:
    """Write a folder that transformers loads, and report what was written."""
    from ttlaunch.app.export_weights import export_folder

    done = export_folder(run, Path(folder), averaged=averaged, runs_dir=runs_dir, working_folder=Path.cwd())
    show_diagnostics(list(done.warnings), form=form)
    if form is Format.JSON:
        print_json({"file": folder, "step": done.step, "tensors": done.tensors}, schema="weights-export")
    else:
        print_lines([f"wrote {counted(done.tensors, 'tensor')} of step {done.step} and the tokenizer to {folder}"])


@app.command(epilog=SHOW_EXAMPLES)
def show(
    what: Annotated[str, typer.Argument(metavar="latest|RUN|PATH|FILE", help="A checkpoint, or a safetensors file.")],
    *,
    runs_dir: RunsDir = Path("runs"),
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="full; concise: tab-separated names, types and shapes; json; github: full and CI annotations.",
        ),
    ] = Format.FULL,
) -> None:
    """List the weights in a checkpoint or a file, with types and shapes."""
    from ttlaunch.records.regular_files import open_regular
    from ttlaunch.running.checkpoints.tensor_file import TensorFileError, parse_header

    if os.path.isfile(what):  # noqa: PTH113 - never raises
        try:
            with open_regular(what, follow=True) as file:
                weights: Mapping[str, FiledTensor] = dict(sorted(parse_header(file, Path(what)).items()))
        except OSError as error:
            raise file_error(what, error, verb="read") from error
        except TensorFileError as error:
            raise usage_error(f"{what} cannot be shown: {error}") from error
    else:
        _, weights = _of_checkpoint(what, runs_dir=runs_dir, form=form)
    if form is Format.JSON:
        tensors = {name: {"dtype": tensor.dtype, "shape": list(tensor.shape)} for name, tensor in weights.items()}
        print_json({"tensors": tensors}, schema="weights")
        return
    if form is Format.CONCISE:
        for name, tensor in weights.items():
            print_lines([tabbed((name, tensor.dtype, tensor.shape))])
        return
    width = max((len(name) for name in weights), default=0)
    for name, tensor in weights.items():
        print_lines([f"{name:{width}}  {tensor.dtype:5} {tensor.shape}"])
    values = sum(math.prod(tensor.shape) for tensor in weights.values())
    print_lines([f"{counted(len(weights), 'tensor')}, {values:,} values"])


def _of_checkpoint(
    run: str, *, runs_dir: Path, form: Format, averaged: bool = False
) -> tuple[int, Mapping[str, "FiledTensor"]]:
    """Return step and weights, or their average, of the newest complete checkpoint of a run or path."""
    from ttlaunch.app.find_start import search_checkpoint
    from ttlaunch.running.checkpoints.tensor_difference import read_weights

    here = Path.cwd()
    checkpoint, found = search_checkpoint(run, runs_dir=here / runs_dir, working_folder=here)
    if checkpoint is None:
        raise LaunchError(found)
    show_diagnostics(found, form=form)
    return checkpoint.step, read_weights(checkpoint.path, averaged=averaged)
