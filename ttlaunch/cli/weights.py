"""`ttlaunch weights`: take the weights out of a checkpoint, as one plain safetensors file that any program reads."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ttlaunch.cli.console import refuse, show_diagnostics
from ttlaunch.diagnostics import Diagnostic, Format
from ttlaunch.diagnostics.count import counted

app = typer.Typer(help="Export weights.", no_args_is_help=True)

EXAMPLES = """\
[bold]ttlaunch weights export latest weights.safetensors[/bold]   of the newest run with a checkpoint

[bold]ttlaunch run hierarchical_parallel --set checkpoint_config.initial_weights=weights.safetensors[/bold]   begin with them
"""


@app.callback()
def _group() -> None:
    """Keeps `export` a command of its own."""


@app.command(epilog=EXAMPLES)
def export(
    run: Annotated[str, typer.Argument(metavar="latest|RUN|PATH", help="A run, or one of its checkpoints.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write; must not exist.")],
    *,
    runs_dir: Annotated[Path, typer.Option("--runs-dir", metavar="DIR", help="Where run folders are.")] = Path("runs"),
    form: Annotated[Format, typer.Option("--format", help="full, concise or json, for mistakes.")] = Format.FULL,
) -> None:
    """Write the weights of the newest whole checkpoint under the names that the model gives its parameters."""
    from ttlaunch.cli.resume import search_checkpoint
    from ttlaunch.contract import OPTIMIZER_PREFIX
    from ttlaunch.launch.tensor_file import StoredTensor, read_header, write_tensors

    if file.exists():
        refuse([Diagnostic("P009", f"{file} exists already")], form=form)
    here = Path.cwd()
    checkpoint, found = search_checkpoint(run, runs_dir=here / runs_dir, working_folder=here)
    if checkpoint is None:
        refuse(found, form=form)
    show_diagnostics(found, form=form)
    weights: dict[str, StoredTensor] = {}
    for name in checkpoint.manifest["files"]:
        tensors = read_header(checkpoint.path / name)
        weights |= {name: tensor for name, tensor in tensors.items() if not name.startswith(OPTIMIZER_PREFIX)}
    write_tensors(file, dict(sorted(weights.items())))
    if form is not Format.JSON:
        sys.stdout.write(f"wrote {counted(len(weights), 'tensor')} of step {checkpoint.step} to {file}\n")
