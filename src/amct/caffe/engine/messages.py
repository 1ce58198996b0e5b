"""The protobuf messages of Caffe, read from prototxt text or binary files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from amct.atomic import check_whole
from amct.caffe.engine.parse_help import with_layers_named
from amct.errors import FileError, ParseError
from amct.schema import ExtraField, descriptor, message_class, parse_text

if TYPE_CHECKING:
    import os

    from amct.caffe.proto_merge import CustomSchema

#: A message of caffe.proto. Its class is created at run time from the descriptor set, so it has no static type.
ProtoMessage: TypeAlias = Any


_extra: tuple[ExtraField, ...] = ()
"""The parameters of layers of extensions, as fields of LayerParameter."""


def add_layer_parameters(field: str, settings: type[Any]) -> None:
    """Give LayerParameter a field for the parameters of a layer of an extension, with the fields of a dataclass.

    Messages made before and after do not mix: call it before any model is read.

    Raises:
        ArgumentError: LayerParameter has that field already.
        ArgumentTypeError: ``settings`` is not a dataclass, or a field has a type that a prototxt cannot hold.
    """
    global _extra
    added = (*_extra, ExtraField(container="caffe.LayerParameter", name=field, settings=settings))
    descriptor("caffe.LayerParameter", schema="caffe", extra=added)
    _extra = added


def remove_layer_parameters(field: str) -> None:
    """Remove a field that ``add_layer_parameters`` added; nothing happens when there is none."""
    global _extra
    _extra = tuple(each for each in _extra if each.name != field)


@cache
def _class(name: str, extra: tuple[ExtraField, ...]) -> ProtoMessage:
    return message_class(f"caffe.{name}", schema="caffe", extra=extra)


def new_message(message: str, /, **fields: object) -> ProtoMessage:
    """Make a message of caffe.proto: ``new_message("LayerParameter", name="conv1")``."""
    return _class(message, _extra)(**fields)


def parse_message(text: str, name: str, source: str = "prototxt", schema: CustomSchema | None = None) -> ProtoMessage:
    """Read a message from prototxt text.

    Args:
        text: The prototxt.
        name: The message's name, for example NetParameter.
        source: The name of the text in error messages.
        schema: Messages merged with a user's custom.proto; by default those of this package.

    Raises:
        ParseError: The text is not a prototxt of that message, with line and column.
    """
    found = descriptor(f"caffe.{name}", schema="caffe", extra=_extra) if schema is None else schema.descriptor(name)
    try:
        return parse_text(text, found, source).to_message()
    except ParseError as error:
        raise with_layers_named(error, text) from None


def read_text_file(path: str | os.PathLike[str]) -> str:
    """Read a text file as UTF-8; invalid bytes (in comments) are replaced.

    Raises:
        FileError: There is no such file, or it cannot be read, or the save that writes it was interrupted.
    """
    check_whole(path)
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise FileError(f"Could not open file {path}: {error.strerror or error}") from error


def read_message(path: str | os.PathLike[str], name: str, schema: CustomSchema | None = None) -> ProtoMessage:
    """Read a prototxt file, for example ``read_message("deploy.prototxt", "NetParameter")``.

    Raises:
        FileError: The file cannot be read.
        ParseError: Its text is not such a message.
    """
    return parse_message(read_text_file(path), name, str(path), schema)
