"""`ttlaunch weights`: export the weights of a checkpoint, import those of another library, list, measure or compare them.

`checkpoint_config.initial_weights` reads such a file. `show`, `stats` and `diff` take a checkpoint, such a file, or a
folder of transformers.
"""

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ttlaunch.cli.console import can_redraw, print_json, print_lines, rich_console, show_diagnostics, tabbed
from ttlaunch.cli.options import RunsDir
from ttlaunch.diagnostics import Format, LaunchError, counted, file_error, shown, usage_error

if TYPE_CHECKING:
    from ttlaunch.running.checkpoints.resume import Checkpoint
    from ttlaunch.running.checkpoints.tensor_difference import OtherTensor
    from ttlaunch.running.checkpoints.tensor_file import FiledTensor
    from ttlaunch.running.checkpoints.tensor_values import TensorDifference, TensorStatistics

app = typer.Typer(help="Show, compare, export and import weights.", no_args_is_help=True)

EXAMPLES = """\
[bold]ttlaunch weights export latest weights.safetensors[/bold]   the weights of the newest run with a checkpoint

[bold]ttlaunch weights export latest average.safetensors --average[/bold]   the averaged weights, if the recipe keeps them

[bold]ttlaunch weights export latest model --as hf[/bold]   a folder that transformers loads, with configuration and tokenizer

[bold]ttlaunch run hierarchical_parallel --set checkpoint_config.initial_weights=weights.safetensors[/bold]   start training from them
"""

IMPORT_EXAMPLES = """\
[bold]ttlaunch weights import gpt2-small weights.safetensors[/bold]   a folder that transformers saved, as weights to begin with

[bold]ttlaunch weights import model.gguf model --as hf[/bold]   a GGUF file as a folder of transformers, with its tokenizer

[bold]ttlaunch weights import model/model.safetensors w.safetensors --format json[/bold]   sizes and SHA-256 for other programs
"""

SHOW_EXAMPLES = """\
[bold]ttlaunch weights show latest[/bold]   the weights of the newest checkpoint

[bold]ttlaunch weights show weights.safetensors[/bold]   those of a file, to compare names and shapes
"""

STATS_EXAMPLES = """\
[bold]ttlaunch weights stats latest[/bold]   the newest checkpoint: are its weights finite, and how large are they?

[bold]ttlaunch weights stats weights.safetensors --format concise[/bold]   a line for each tensor of a file, for other programs
"""

DIFF_EXAMPLES = """\
[bold]ttlaunch weights diff 3fa1 77b2[/bold]   did two runs end with the same bits, and where do they differ?

[bold]ttlaunch weights diff latest weights.safetensors[/bold]   a checkpoint and a file
"""

Weights = Annotated[
    str,
    typer.Argument(
        metavar="latest|RUN|PATH|FILE", help="A checkpoint, a safetensors file, or a folder of transformers."
    ),
]
WeightsForm = Annotated[
    Format,
    typer.Option(
        "--format",
        help="full; concise: a tab-separated line for each tensor; json; github: full and CI annotations.",
    ),
]
_LONGEST_PATH = 200
_SHOW_AFTER_S = 1.0
_MOST_STEPS = 8


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

    _refuse_output(file)
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


def _refuse_output(file: str) -> None:
    """Refuse to write a file that has no name or exists.

    Raises:
        LaunchError: It does.
    """
    if not file.strip():
        raise usage_error("an empty text names no file to write")
    if os.path.lexists(file):  # never raises, whatever was typed
        raise usage_error(f"{file} already exists", "name another file")


def _export_folder(run: str, folder: str, *, runs_dir: Path, form: Format, averaged: bool) -> None:
    """Write a folder that transformers loads, and report what was written."""
    from ttlaunch.app.export_weights import export_folder

    done = export_folder(run, Path(folder), averaged=averaged, runs_dir=runs_dir, working_folder=Path.cwd())
    show_diagnostics(list(done.warnings), form=form)
    if form is Format.JSON:
        print_json({"file": folder, "step": done.step, "tensors": done.tensors}, schema="weights-export")
    else:
        print_lines([f"wrote {counted(done.tensors, 'tensor')} of step {done.step} and the tokenizer to {folder}"])


@app.command("import", epilog=IMPORT_EXAMPLES)
def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER|FILE", help="A folder that transformers saved, a safetensors file of one, or a GGUF file."
        ),
    ],
    file: Annotated[str, typer.Argument(metavar="TO", help="Output file or folder, which must not exist.")],
    *,
    layout: Annotated[
        Literal["plain", "hf"],
        typer.Option(
            "--as",
            help="plain: a safetensors file, under our parameter names; hf: for a GGUF, a folder of transformers "
            "with its configuration, tokenizer and chat template.",
        ),
    ] = "plain",
    form: Annotated[
        Format, typer.Option("--format", help="Format of the answer: full, concise, json or github.")
    ] = Format.FULL,
) -> None:
    """Write the weights of a model that transformers or llama.cpp saved as a safetensors file to begin a training with.

    Every tensor is accounted for before anything is written; pickles are refused, and no code of a folder is run.
    """
    from ttlaunch.app.import_weights import find_pretrained, write_pretrained, write_pretrained_folder

    _refuse_output(file)
    model = find_pretrained(source)
    with _progress(sum(tensor.size for tensor in model.weights.values()), form=form) as advance:
        if layout == "hf":
            sha256, warnings = write_pretrained_folder(model, Path(file), source=source, wrote=advance)
        else:
            sha256, warnings = write_pretrained(model, Path(file), source=source, wrote=advance), []
    show_diagnostics(warnings, form=form)
    count = len(model.gguf.tensors) if model.gguf and layout == "hf" else len(model.weights)
    quantised = dict(sorted(model.gguf.quantised.items())) if model.gguf else {}
    keys = {f"transformer_config.{key}": value for key, value in model.sizes.items()}
    keys = keys if model.model_type == "gpt" else {"training_config.model_type": model.model_type, **keys}
    if form is Format.JSON:
        facts = {"file": file, "tensors": count, "sha256": sha256, "vocabulary": model.vocabulary}
        facts["dequantised"] = quantised
        print_json({**facts, "set": keys}, schema="weights-import")
        return
    if form is Format.CONCISE:
        print_lines([tabbed((file, count, sha256))])
        return
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in keys.items()}
    sets = [f"--set {shlex.quote(f'{key}={value}')}" for key, value in values.items()]
    print_lines([f"wrote {counted(count, 'tensor')} to {file}", f"SHA-256 {sha256}"])
    for kind, number in quantised.items():
        were = "was" if number == 1 else "were"
        print_lines([f"{counted(number, 'tensor')} of {kind} {were} dequantised to F32"])
    if layout == "hf":
        print_lines([f"`--set checkpoint_config.initial_weights=hf:{file}` begins a training with them"])
        return
    print_lines([f"a model of {model.vocabulary:,} tokens and these sizes begins with them:", *sets])


@app.command(epilog=SHOW_EXAMPLES)
def show(
    what: Weights,
    *,
    runs_dir: RunsDir = Path("runs"),
    form: WeightsForm = Format.FULL,
) -> None:
    """List the weights in a checkpoint or a file, with types and shapes; of a checkpoint also where it comes from."""
    from ttlaunch.running.checkpoints.tensor_difference import read_weights

    checkpoint = None if _is_file_of_weights(what) else _find_checkpoint(what, runs_dir=runs_dir, form=form)
    weights = (
        read_weights(checkpoint.path) if checkpoint else _weights_of(what, runs_dir=runs_dir, form=form, verb="shown")
    )
    if form is Format.JSON:
        tensors = {name: {"dtype": tensor.dtype, "shape": list(tensor.shape)} for name, tensor in weights.items()}
        print_json({"tensors": tensors, "provenance": _chain_as_json(checkpoint)}, schema="weights")
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
    if checkpoint is not None:
        print_lines(_chain_lines(checkpoint))


def _chain_as_json(checkpoint: "Checkpoint | None") -> dict[str, object] | None:
    """Return the chain as the manifest has it, with the reason why it cannot be used; None without one."""
    from ttlaunch.records.parser import BadRecord
    from ttlaunch.running.runs.provenance import KEY, read_provenance

    chain = None if checkpoint is None else read_provenance(checkpoint.manifest)
    if checkpoint is None or chain is None:
        return None
    if isinstance(chain, BadRecord):
        return {"problem": chain.reason}
    return {"problem": None, **checkpoint.manifest[KEY]}


def _chain_lines(checkpoint: "Checkpoint") -> Iterator[str]:
    """Show where a checkpoint comes from: for each run of its chain, the steps of its checkpoints and what computed them."""
    from ttlaunch.records.parser import BadRecord
    from ttlaunch.running.runs.provenance import read_provenance

    chain = read_provenance(checkpoint.manifest)
    if chain is None:
        yield "no provenance: an older ttlaunch made this checkpoint"
        return
    if isinstance(chain, BadRecord):
        yield f"provenance: {shown(chain.reason, longest=_LONGEST_PATH)}"
        return
    yield f"provenance {chain.sha256}"
    if chain.left_out:
        yield f"  {counted(chain.left_out, 'older checkpoint')}, left out"
    elif chain.links[0].after:
        yield f"  a checkpoint of step {chain.links[0].after} without provenance"
    for (run, name), links in groupby(chain.links, key=lambda one: (one.run, one.conditions)):
        steps = [str(one.step) for one in links]
        those = steps if len(steps) <= _MOST_STEPS else [*steps[:1], "…", *steps[-_MOST_STEPS + 2 :]]
        yield f"  {shown(run)} ({shown(chain.conditions[name].recipe)}): step {', '.join(those)}"
        known = chain.conditions[name]
        hashes = {key: getattr(known, key) for key in ("code", "ttlaunch", "configuration", "data")}
        yield "    " + ", ".join(f"{key} {str(value)[:12] if value else '–'}" for key, value in hashes.items())
        versions = [f"{shown(key)} {shown(value)}" for key, value in known.libraries.items()]
        yield f"    {', '.join([*versions, shown(known.cpu)] if known.cpu else versions)}"


@app.command(epilog=STATS_EXAMPLES)
def stats(what: Weights, *, runs_dir: RunsDir = Path("runs"), form: WeightsForm = Format.FULL) -> None:
    """Measure the weights in a checkpoint or a file: norm, least and largest value, mean, and how many are not finite."""
    from ttlaunch.running.checkpoints.tensor_values import is_readable, measure

    weights = _weights_of(what, runs_dir=runs_dir, form=form, verb="measured")
    try:
        found = {name: measure(one) if is_readable(one.dtype) else None for name, one in _in_turn(weights, form=form)}
    except OSError as error:
        raise file_error(error.filename or what, error, verb="read") from error
    if form is Format.JSON:
        rows = {
            name: {"dtype": one.dtype, "shape": list(one.shape), **_finite(found[name])}
            for name, one in weights.items()
        }
        print_json({"tensors": rows}, schema="weights-stats")
        return
    width = max((len(name) for name in weights), default=0)
    for name, measured in found.items():
        if form is Format.CONCISE:
            print_lines([tabbed((name, *_finite(measured).values()))])
        else:
            print_lines([f"{name:{width}}  {_statistics(measured, dtype=weights[name].dtype)}"])
    if form is not Format.CONCISE:
        bad = sum(one.nan + one.infinite for one in found.values() if one)
        print_lines([f"{counted(len(weights), 'tensor')}, {bad:,} values that are not finite"])


def _statistics(one: "TensorStatistics | None", *, dtype: str) -> str:
    if one is None:
        return f"values of type {dtype} are not read"
    bad = f", {one.nan:,} NaN, {one.infinite:,} infinite" if one.nan or one.infinite else ""
    if one.mean is None:
        return f"no finite value{bad}"
    return f"norm {one.norm:<10.5g} from {one.least:<11.5g} to {one.largest:<11.5g} mean {one.mean:.5g}{bad}"


def _finite(one: "TensorStatistics | TensorDifference | None") -> dict[str, object]:
    """Return the numbers by name, without infinite ones and NaN, which JSON does not have; empty without any."""
    numbers = asdict(one) if one else {}
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in numbers.items()
    }


@app.command(epilog=DIFF_EXAMPLES)
def diff(left: Weights, right: Weights, *, runs_dir: RunsDir = Path("runs"), form: WeightsForm = Format.FULL) -> None:
    """Compare two sets of weights, value by value.

    The exit status is 0 if names, types, shapes and all bits are the same, and 1 if not.
    """
    from ttlaunch.running.checkpoints.tensor_difference import compare

    one, other = (_weights_of(what, runs_dir=runs_dir, form=form, verb="compared") for what in (left, right))
    _refuse_other_names((left, right), (one, other))
    only = [sorted(one.keys() - other.keys()), sorted(other.keys() - one.keys())]
    both = {name: tensor for name, tensor in one.items() if name in other}
    try:
        found = {name: compare(tensor, other[name]) for name, tensor in _in_turn(both, form=form)}
    except OSError as error:
        raise file_error(error.filename or left, error, verb="read") from error
    differ = {name: how for name, how in found.items() if how}
    same = not (differ or any(only))
    if form is Format.JSON:
        facts = {
            "same": same,
            "compared": len(both),
            "only_left": only[0],
            "only_right": only[1],
            "differences": {name: _as_json(how) for name, how in differ.items()},
        }
        print_json(facts, schema="weights-diff")
    elif form is Format.CONCISE:
        for side, names in zip(("left", "right"), only, strict=True):
            print_lines([tabbed((name, f"only {side}")) for name in names])
        print_lines([tabbed((name, _in_words(how))) for name, how in differ.items()])
    else:
        titles = [shown(what, longest=_LONGEST_PATH) for what in (left, right)]
        print_lines([f"{titles[0]} → {titles[1]}"])
        for title, names in zip(titles, only, strict=True):
            print_lines([f"{name}: only in {title}" for name in names])
        print_lines([f"{name}: {_in_words(how)}" for name, how in differ.items()])
        equal = counted(len(both) - len(differ), "tensor")
        print_lines([f"{equal} the same to the last bit, {len(differ) + len(only[0]) + len(only[1])} not"])
    if not same:
        raise typer.Exit(1)


def _as_json(how: "OtherTensor") -> dict[str, object]:
    pairs = {"dtype": how.dtypes, "shape": how.shapes}
    facts: dict[str, object] = {key: list(pair) for key, pair in pairs.items() if pair}
    return facts | _finite(how.values) | ({"bytes": "other"} if how.has_other_bytes else {})


def _in_words(how: "OtherTensor") -> str:
    pairs = {"dtype": how.dtypes, "shape": how.shapes}
    words = [f"{key} {pair[0]} → {pair[1]}" for key, pair in pairs.items() if pair]
    if how.values:
        one = how.values
        differ = "1 value differs" if one.values == 1 else f"{one.values:,} values differ"
        words.append(f"{differ}, first at {list(one.first)}: {one.left!r} → {one.right!r}")
        words.append(f"at most {one.largest:.3g} apart, relative {one.relative:.3g}")
    if how.has_other_bytes:
        words.append("other bytes; values of this type are not read")
    return "; ".join(words)


def _in_turn(weights: Mapping[str, "FiledTensor"], *, form: Format) -> Iterator[tuple[str, "FiledTensor"]]:
    """Yield each tensor with its name; after a second, show on a terminal how much has been read."""
    with _progress(sum(tensor.size for tensor in weights.values()), form=form) as advance:
        for name, tensor in weights.items():
            yield name, tensor
            advance(tensor.size)


@contextmanager
def _progress(total: int, *, form: Format) -> Iterator[Callable[[int], object]]:
    """Return what to call with a number of bytes that were read or written; after a second a terminal shows their sum."""
    if form is Format.JSON or not can_redraw(sys.stderr):
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress

    bar = Progress(BarColumn(bar_width=30), DownloadColumn(), console=rich_console(sys.stderr), transient=True)
    with bar:
        task = bar.add_task("", total=total, visible=False)
        began = time.monotonic()
        yield lambda done: bar.update(task, advance=done, visible=time.monotonic() - began > _SHOW_AFTER_S)


def _weights_of(what: str, *, runs_dir: Path, form: Format, verb: str) -> Mapping[str, "FiledTensor"]:
    """Return the weights of a file, or of the newest complete checkpoint of a run or path, by name."""
    from ttlaunch.app.import_weights import is_pretrained, pretrained_tensors
    from ttlaunch.records.regular_files import open_regular
    from ttlaunch.running.checkpoints.tensor_file import TensorFileError, parse_header

    if is_pretrained(what):
        return dict(sorted(pretrained_tensors(what, verb=verb).items()))
    if not _is_file_of_weights(what):
        return _of_checkpoint(what, runs_dir=runs_dir, form=form)[1]
    try:
        with open_regular(what, follow=True) as file:
            # The tensors are read later by the file's own name: what was typed may be a link.
            return dict(sorted(parse_header(file, Path(os.path.realpath(what))).items()))
    except OSError as error:
        raise file_error(what, error, verb="read") from error
    except TensorFileError as error:
        raise usage_error(f"{what} cannot be {verb}: {error}") from error


def _refuse_other_names(whats: Sequence[str], weights: Sequence[Mapping[str, "FiledTensor"]]) -> None:
    """Refuse a folder of transformers beside weights of ours: no name is in both, and nothing would be compared."""
    from ttlaunch.app.import_weights import is_pretrained

    theirs = [shown(what, longest=_LONGEST_PATH) for what in whats if is_pretrained(what)]
    if len(theirs) == 1 and not weights[0].keys() & weights[1].keys():
        hint = f"`ttlaunch weights import {theirs[0]} FILE` writes them under our names, and FILE can be compared"
        raise usage_error(
            f"{theirs[0]} has the names of transformers, and nothing in common with the other weights", hint
        )


def _is_file_of_weights(what: str) -> bool:
    from ttlaunch.app.import_weights import is_pretrained

    return is_pretrained(what) or os.path.isfile(what)  # noqa: PTH113 - never raises


def _of_checkpoint(
    run: str, *, runs_dir: Path, form: Format, averaged: bool = False
) -> tuple[int, Mapping[str, "FiledTensor"]]:
    """Return step and weights, or their average, of the newest complete checkpoint of a run or path."""
    from ttlaunch.running.checkpoints.tensor_difference import read_weights

    checkpoint = _find_checkpoint(run, runs_dir=runs_dir, form=form)
    return checkpoint.step, read_weights(checkpoint.path, averaged=averaged)


def _find_checkpoint(run: str, *, runs_dir: Path, form: Format) -> "Checkpoint":
    from ttlaunch.app.find_start import search_checkpoint

    here = Path.cwd()
    checkpoint, found = search_checkpoint(run, runs_dir=here / runs_dir, working_folder=here)
    if checkpoint is None:
        raise LaunchError(found)
    show_diagnostics(found, form=form)
    return checkpoint
