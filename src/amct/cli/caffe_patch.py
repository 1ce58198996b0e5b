"""``amct caffe patch``: the quantization layers for a real Caffe, as a folder or put into its source tree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import amct
from amct.atomic import FileGroup
from amct.cli.printing import show
from amct.errors import ArgumentError, ConfigError, Problem

app = typer.Typer(
    name="patch",
    help="The layers of quantized models for a real Caffe: install them into its source tree.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_EXPORTED = (".cpp", ".hpp", ".patch", ".proto", ".py", ".sh")
_CAFFE_PROTO = Path(amct.__file__).parent / "schema" / "caffe.proto"


@app.command()
def export(folder: Annotated[Path, typer.Argument(help="The folder to write; it must be empty or not there.")]) -> None:
    """Write the folder caffe_patch, whose install.py needs no AMCT: for the machine where your Caffe is."""
    from caffe_patch import install as installer

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArgumentError(f"{folder}: must be a new or an empty folder")
    own = Path(installer.HERE)
    files = [path for path in sorted(own.rglob("*")) if path.is_file() and path.suffix in _EXPORTED]
    with FileGroup() as group:
        for path in files:
            group.write_bytes(folder / path.relative_to(own), path.read_bytes())
        group.write_bytes(folder / "merge_proto" / "caffe.proto", _CAFFE_PROTO.read_bytes())
    show(f"written: {folder}; on the machine of your Caffe: python3 {folder / 'install.py'} --caffe_dir CAFFE_DIR")


@app.command()
def install(
    caffe_dir: Annotated[str, typer.Option("--caffe_dir", "--caffe-dir", help="The source tree of your Caffe.")],
    custom_proto: Annotated[
        str | None, typer.Option("--custom_proto", "--custom-proto", help="Your .proto file with layers of your own.")
    ] = None,
    uninstall: Annotated[bool, typer.Option("--uninstall", help="Take everything back.")] = False,
) -> None:
    """Put the layers into the source tree of a Caffe, merge its caffe.proto and build libquant.so (CPU only)."""
    from caffe_patch import install as installer

    try:
        if uninstall:
            installer.uninstall(caffe_dir, show)
        else:
            installer.install(caffe_dir, custom_proto, show, str(_CAFFE_PROTO))
    except installer.PatchError as error:
        raise ConfigError.from_problems([Problem(problem) for problem in error.problems]) from error
