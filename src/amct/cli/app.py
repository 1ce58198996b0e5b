"""The typer application with all commands."""

from __future__ import annotations

from typing import Annotated

import typer

import amct
from amct.cli import caffe, compare, config, doctor, inspect, prune, quantize, record, search

app = typer.Typer(
    name="amct",
    help="Quantize PyTorch, Caffe and ONNX networks with AMCT's files and names.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: rich formatting would double the start-up time
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"amct {amct.__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that stand before a command."""
    del version  # its callback has shown it
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.add_typer(caffe.app)
app.command()(quantize.quantize)
app.command()(quantize.sensitivity)
app.command()(doctor.doctor)
app.command()(inspect.inspect)
app.command()(prune.prune)
app.command()(compare.compare)
app.command()(compare.report)
app.add_typer(search.app)
app.add_typer(config.app)
app.add_typer(record.app)
