"""``amct record``: show record files, compare them, and convert them between text and binary."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from amct.cli import printing
from amct.cli.options import JsonOption

if TYPE_CHECKING:
    from amct.record import RecordDialect

app = typer.Typer(
    name="record",
    help="Look at record files (quantization factors, pruning chains), compare them, convert them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

DIFFERENT = 1


class DialectChoice(str, Enum):
    """The dialect of a record; ``auto`` detects it from the content."""

    auto = "auto"
    pytorch = "pytorch"
    caffe = "caffe"


class FormChoice(str, Enum):
    """The form to write; ``auto`` selects it by the suffix of the file name."""

    auto = "auto"
    text = "text"
    binary = "binary"


DialectOption = Annotated[
    DialectChoice, typer.Option("--dialect", help="Whose record it is; auto tells it from the content.")
]


def _dialect(choice: DialectChoice) -> RecordDialect | None:
    return None if choice is DialectChoice.auto else choice.value


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="The record file, text or binary.")],
    dialect: DialectOption = DialectChoice.auto,
    as_json: JsonOption = False,
) -> None:
    """Show what a record says, a line for each layer."""
    from amct.record import describe_record, plain_record, read_any_record

    record = read_any_record(file, dialect=_dialect(dialect))
    if as_json:
        printing.show_json(plain_record(record))
    else:
        printing.show(describe_record(record).removesuffix("\n"))


@app.command()
def diff(
    left: Annotated[Path, typer.Argument(help="The one record file.")],
    right: Annotated[Path, typer.Argument(help="The other record file.")],
    dialect: DialectOption = DialectChoice.auto,
    as_json: JsonOption = False,
) -> None:
    """Show what differs between two records. The exit code is 0 when nothing does, 1 when something does."""
    from amct.record import describe_difference, diff_records, plain_difference, read_any_record

    records = [read_any_record(file, dialect=_dialect(dialect)) for file in (left, right)]
    differences = diff_records(*records)
    if as_json:
        printing.show_json([plain_difference(difference) for difference in differences])
    else:
        for difference in differences:
            printing.show(describe_difference(difference))
    if differences:
        raise typer.Exit(DIFFERENT)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="The record file to read, text or binary.")],
    target: Annotated[Path, typer.Argument(help="The record file to write.")],
    dialect: DialectOption = DialectChoice.auto,
    form: Annotated[
        FormChoice, typer.Option("--form", help="What to write; auto: binary for *.bin, text for any other name.")
    ] = FormChoice.auto,
) -> None:
    """Write a record as text or as binary, in the layout of AMCT's documents (an old dialect becomes the new one)."""
    from amct.record import convert_record_file

    wanted = None if form is FormChoice.auto else form.value
    written = convert_record_file(source, target, dialect=_dialect(dialect), form=wanted)
    printing.show(f"{target}: written as {written}")
