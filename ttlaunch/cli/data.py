"""`ttlaunch data`: make a training file from a dataset or texts, or from their tokens."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ttlaunch.cli.console import file_exists, print_json, print_lines, write_file
from ttlaunch.cli.options import PlainFormat
from ttlaunch.diagnostics import Diagnostic, Format, LaunchError, counted, shown, usage_error

EXAMPLES = """\
[bold]ttlaunch data stories book.txt[/bold]   the texts of a folder that the datasets library saved

[bold]ttlaunch data stories tokens.txt --tokenizer tokenizer.json[/bold]   their token ids, for tokenizer_type: ids

[bold]ttlaunch data book.txt tokens.txt --tokenizer tokenizer.json[/bold]   the token ids of a text
"""


def data(
    read: Annotated[
        Path, typer.Argument(metavar="FROM", help="A dataset's folder, a text file, or a folder of text files.")
    ],
    write: Annotated[Path, typer.Argument(metavar="TO", help="The file to write.")],
    *,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A tokenizer.json. TO then contains token ids, for tokenizer_type: ids."),
    ] = None,
    column: Annotated[str, typer.Option(metavar="NAME", help="The dataset's column with the texts.")] = "text",
    split: Annotated[
        str, typer.Option(metavar="NAME", help="The split to read, if the dataset has several.")
    ] = "train",
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file.")] = False,
    form: PlainFormat = Format.FULL,
) -> None:
    """Make a training file from a dataset or a text, as plain text or as token ids."""
    from ttlaunch.app.tokenized_data import tokens_of_texts
    from ttlaunch.spec.recipe.adapters import AdapterError, read_dataset
    from ttlaunch.spec.recipe.corpus import CorpusError, read_corpus

    if str(write) == "-":
        message = "`-` is no file that a training could read"
        raise usage_error(message, "name the file to write")
    if not force and os.path.lexists(write):  # never raises, and minutes of tokens are not lost
        raise file_exists(write)
    is_dataset = any((read / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))
    try:
        texts = list(read_dataset(read, column=column, split=split)) if is_dataset else [read_corpus(read).characters]
        if tokenizer is None:
            content = "".join(text if text.endswith("\n") else f"{text}\n" for text in texts).encode()
        else:
            content = tokens_of_texts(texts, tokenizer)
    except CorpusError as error:
        hints = (error.hint,) if error.hint else ()
        if error.package:  # the tokenizer or dataset needs a library that is not installed here
            raise LaunchError([Diagnostic("C088", shown(error), hints=hints)]) from error
        raise usage_error(shown(error), *hints) from error
    except AdapterError as error:
        raise usage_error(shown(error)) from error
    write_file(write, content, force=force)
    if form is Format.JSON:
        print_json({"path": str(write), "bytes": len(content), "texts": len(texts)}, schema="data")
    else:
        print_lines([f"wrote {shown(write)}: {counted(len(texts), 'text')}, {len(content):,} bytes"])
