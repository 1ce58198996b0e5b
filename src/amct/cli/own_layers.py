"""Options for a user's own layers of Caffe nets, the same of every command: messages, modules, Python layers."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from amct.cli.model_layers import import_module, modules_of_the_working_directory
from amct.cli.options import with_options_of
from amct.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


@dataclass(frozen=True, kw_only=True)
class OwnLayers:
    """The options; inside ``in_effect`` every file is read and every net is built as they say."""

    custom_proto: Annotated[
        Path | None,
        typer.Option(
            "--custom-proto", help="Caffe: a custom.proto with messages of your own layers; none unless given."
        ),
    ] = None
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            help="A Python module or file.py to import first: it runs, and registers layers or formats; "
            "none unless given.",
        ),
    ] = None
    allow_python: Annotated[
        bool, typer.Option("--allow-python", help="Caffe: let Python layers run. They execute code.")
    ] = False

    def refuse_unless_caffe(self, is_caffe: bool) -> None:
        """Refuse options that only Caffe models have.

        Raises:
            ArgumentError: One is given for another model.
        """
        for option, given in (("--custom-proto", self.custom_proto), ("--allow-python", self.allow_python)):
            if given and not is_caffe:
                raise ArgumentError(f"{option} is for Caffe models, a prototxt with a caffemodel; leave it out")

    @contextmanager
    def in_effect(self) -> Iterator[None]:
        """Import the modules; inside, files have the messages of the custom.proto, and Python layers may run.

        Raises:
            AmctError: A file cannot be read, or a module is not found.
        """
        with ExitStack() as stack:
            if self.allow_python:
                from amct.caffe.engine.layers.python_layer import allow_python_layers
                from amct.caffe.pycaffe.runtime import imported_as_caffe

                stack.enter_context(imported_as_caffe(force=True))  # Python layers begin with "import caffe"
                stack.enter_context(modules_of_the_working_directory())
                stack.enter_context(allow_python_layers())
            for module in self.modules or ():
                import_module(module, "--import")
            if self.custom_proto is not None:
                from amct.caffe.engine.messages import custom_messages

                stack.enter_context(custom_messages(self.custom_proto))
            yield


def takes_own_layers(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command: its parameter ``own``, if it has one, is replaced by the options, which are in effect."""

    def run(given: OwnLayers, call: Callable[[OwnLayers], Any]) -> Any:  # noqa: ANN401  what a command returns
        with given.in_effect():
            return call(given)

    return with_options_of(OwnLayers, command, "own", run)
