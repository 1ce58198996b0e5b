"""A user's ``custom.proto`` joined with caffe.proto and AMCT's messages, as a file and at run time.

The merge itself is in ``caffe_patch``, whose ``install.py`` needs it where there is no amct.
A ``caffe_pb2.py`` that protoc made of a user's whole caffe.proto adds what is unknown here, and clashes with nothing.
"""

from __future__ import annotations

import ast
import logging
import re
import sys
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from amct.atomic import AnyPath, FileGroup, is_file, read_bytes
from amct.caffe.engine.messages import layer_extensions
from amct.errors import ConfigError, FileError, ParseError, Position, Problem, did_you_mean
from amct.schema.extension import with_extra_fields
from amct.schema.pool import numbered
from caffe_patch.merge_proto.merge import (
    LAYER,
    SCALARS,
    MergeError,
    Message,
    ProtoError,
    ProtoFile,
    merge,
    parse,
    to_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.descriptor import Descriptor

    from amct.caffe.engine.messages import ProtoMessage
    from caffe_patch.merge_proto.merge import Enum, Field


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CustomSchema:
    """The merged messages, ready to read prototxt files, and notes for the user."""

    file: FileDescriptorProto
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, message: ProtoMessage) -> CustomSchema:
        """The schema of a message that was read with a custom.proto."""
        file = FileDescriptorProto()
        message.DESCRIPTOR.file.CopyToProto(file)
        return cls(file)

    @cached_property
    def _pool(self) -> DescriptorPool:
        pool = DescriptorPool()
        pool.AddSerializedFile(self.file.SerializeToString())
        return pool

    def descriptor(self, name: str) -> Descriptor:
        """The descriptor of a message: ``descriptor("NetParameter")``."""
        return self._pool.FindMessageTypeByName(f"caffe.{name}")

    def new_message(self, message: str, /, **fields: object) -> ProtoMessage:
        """A message of the merged schema."""
        return GetMessageClass(self.descriptor(message))(**fields)


def load_custom_schema(custom: AnyPath) -> CustomSchema:
    """Merge a custom.proto with this package's caffe.proto, to run nets that use its messages.

    Raises:
        FileError, ParseError, ConfigError: It cannot be read, is not a .proto file, or conflicts.
    """
    return _merged(_ours(), custom)


_COMPILED = ("caffe_pb2.py", "caffe/proto/caffe_pb2.py")
"""What protoc made of caffe.proto, in a folder of the Python path: alone, or in a Caffe's ``python`` folder."""
_MOST_BYTES = 2**24


def compiled_schema() -> CustomSchema | None:
    """This package's messages with those of the first ``caffe_pb2.py`` in the Python path; None if there is none.

    The file is not run: only the description that protoc has put into it is read.
    """
    for path in (Path(folder) / name for folder in sys.path for name in _COMPILED):
        found = _description(path)
        if found is None:
            continue
        schema = _merged(_ours(), None)
        _extend(schema.file, found)
        try:
            schema.descriptor("NetParameter")
        except (TypeError, KeyError) as error:
            logger.warning("%s: its messages cannot be used: %s", path, error)
            continue
        logger.info("messages of layers that are unknown here are those of %s", path)
        return schema
    return None


def _description(path: Path) -> FileDescriptorProto | None:
    """The messages in a file that protoc made of a caffe.proto; None if it is none."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        calls = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Call)]
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for call in calls:
        given = [each.value for each in call.keywords if each.arg == "serialized_pb"]
        if isinstance(call.func, ast.Attribute) and call.func.attr == "AddSerializedFile":
            given += call.args
        for value in given:
            inner = value.args[0] if isinstance(value, ast.Call) and value.args else value  # _b('...'), for Python 2
            content = inner.value if isinstance(inner, ast.Constant) else None
            try:
                content = content.encode("latin1") if isinstance(content, str) else content
                file = FileDescriptorProto.FromString(content if isinstance(content, bytes) else b"")
            except (DecodeError, UnicodeEncodeError):
                continue
            if file.package == "caffe" and any(message.name == LAYER for message in file.message_type):
                return file
    return None


def _extend(ours: FileDescriptorProto | DescriptorProto, theirs: FileDescriptorProto | DescriptorProto) -> None:
    """Add messages, enums and fields that are unknown here; a field whose number is taken gets another one."""
    mine, other = _inner(ours), _inner(theirs)
    known = {each.name: each for each in mine}
    for message in other:
        if message.name in known:
            _extend(known[message.name], message)
        else:
            mine.add().CopyFrom(message)
    enums = {each.name: each for each in ours.enum_type}
    for enum in theirs.enum_type:
        if enum.name in enums:
            _extend_enum(enums[enum.name], enum)
        else:
            ours.enum_type.add().CopyFrom(enum)
    if isinstance(ours, FileDescriptorProto) or isinstance(theirs, FileDescriptorProto):
        return
    names, numbers = {each.name for each in ours.field}, {each.number for each in ours.field}
    for item in theirs.field:
        if item.name not in names:
            added = ours.field.add()
            added.CopyFrom(item)
            added.ClearField("oneof_index")
            if item.number in numbers:
                added.number = numbered(item.name)


def _inner(container: FileDescriptorProto | DescriptorProto) -> Any:  # noqa: ANN401  a protobuf container
    return container.message_type if isinstance(container, FileDescriptorProto) else container.nested_type


def _extend_enum(ours: EnumDescriptorProto, theirs: EnumDescriptorProto) -> None:
    names, numbers = {each.name for each in ours.value}, {each.number for each in ours.value}
    for value in theirs.value:
        if value.name not in names and value.number not in numbers:
            ours.value.add().CopyFrom(value)


def merge_files(
    custom: AnyPath | None,
    output: AnyPath,
    caffe: AnyPath | None = None,
) -> CustomSchema:
    """Merge a caffe.proto (by default this package's) with AMCT's layers and a custom.proto, and write the result.

    A file that is there already is kept with ``.bak`` behind its name.

    Raises:
        FileError, ParseError, ConfigError: A file cannot be read or written, is not a .proto file, or conflicts.
    """
    base = _ours() if caffe is None else _read(caffe)
    base.package = base.package or "caffe"
    result = _merged(base, custom)
    with FileGroup() as group:
        if is_file(output):
            group.write_bytes(f"{output}.bak", read_bytes(output))
        group.write_text(output, to_text(base))
    return result


def _merged(base: ProtoFile, custom: AnyPath | None) -> CustomSchema:
    """Merge AMCT's layers and a custom.proto into a file."""
    own = parse((resources.files("caffe_patch.merge_proto") / "amct_custom.proto").read_text("utf-8"), "AMCT's layers")
    try:
        notes = merge(base, own, None if custom is None else _read(custom))
    except MergeError as error:
        raise ConfigError.from_problems([Problem(problem) for problem in error.problems]) from error
    for note in notes:
        logger.info("%s", note)
    file = with_extra_fields(descriptor_of(base, str(custom or base.source)), layer_extensions())
    return CustomSchema(file, notes)


def _ours() -> ProtoFile:
    return parse((resources.files("amct.schema") / "caffe.proto").read_text("utf-8"), "caffe.proto")


def _read(path: AnyPath) -> ProtoFile:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: cannot be read: {error}") from error
    return read_proto(text, str(path))


def read_proto(text: str, source: str) -> ProtoFile:
    """Parse the text of a .proto file.

    Raises:
        ParseError: It is not such a file, with line and column.
    """
    try:
        return parse(text, source)
    except ProtoError as error:
        raise ParseError(error.message, position=Position(error.source, error.line, error.column)) from error


# -- A parsed file as protobuf's description of it ---------------------------------------------------------------------

_SCALAR_TYPES = {name: getattr(FieldDescriptorProto, f"TYPE_{name.upper()}") for name in SCALARS}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}


def descriptor_of(file: ProtoFile, source: str) -> FileDescriptorProto:
    """Describe a parsed file to protobuf.

    Args:
        file: The file.
        source: The file that an error names.

    Raises:
        ConfigError: The type of a field is not defined.
    """
    made = FileDescriptorProto(name="merged.proto", syntax="proto2", package=file.package)
    for enum in file.enums:
        _fill_enum(made.enum_type.add(), enum)
    for message in file.messages:
        _fill_message(made.message_type.add(), message)
    _resolve_types(made, source)
    return made


def _fill_enum(made: EnumDescriptorProto, enum: Enum) -> None:
    made.name = enum.name
    for name, number in enum.values:
        made.value.add(name=name, number=number)


def _fill_message(made: DescriptorProto, message: Message) -> None:
    made.name = message.name
    for enum in message.enums:
        _fill_enum(made.enum_type.add(), enum)
    for nested in message.messages:
        _fill_message(made.nested_type.add(), nested)
    for choice in message.choices:
        made.oneof_decl.add(name=choice)
    for each in message.fields:
        _fill_field(made.field.add(name=each.name, number=each.number), each)
        if each.choice is not None:
            made.field[-1].oneof_index = message.choices.index(each.choice)


def _fill_field(made: FieldDescriptorProto, field: Field) -> None:
    made.label = getattr(FieldDescriptorProto, f"LABEL_{field.label.upper()}")
    if field.kind in _SCALAR_TYPES:
        made.type = _SCALAR_TYPES[field.kind]
    else:
        made.type_name = field.kind
    for name, text in field.options.items():
        if name == "default":
            made.default_value = _constant(text)
        else:
            setattr(made.options, name, text == "true")


def _constant(text: str) -> str:
    """The value of a constant as descriptors hold it: strings without quotes, whole numbers in decimal."""
    if text[0] in "\"'":
        return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), text[1:-1])
    return str(int(text, 16)) if text.lower().startswith(("0x", "-0x")) else text


def _resolve_types(file: FileDescriptorProto, source: str) -> None:
    """Replace type names by full names, in place, and set whether each is a message or an enum."""
    kinds: dict[str, int] = {}
    prefix = f".{file.package}" if file.package else ""
    for enum in file.enum_type:
        kinds[f"{prefix}.{enum.name}"] = FieldDescriptorProto.TYPE_ENUM
    for message in file.message_type:
        _collect(message, prefix, kinds)
    for message in file.message_type:
        _resolve(message, f"{prefix}.{message.name}", kinds, source)


def _collect(message: DescriptorProto, scope: str, kinds: dict[str, int]) -> None:
    name = f"{scope}.{message.name}"
    kinds[name] = FieldDescriptorProto.TYPE_MESSAGE
    for enum in message.enum_type:
        kinds[f"{name}.{enum.name}"] = FieldDescriptorProto.TYPE_ENUM
    for nested in message.nested_type:
        _collect(nested, name, kinds)


def _resolve(message: DescriptorProto, scope: str, kinds: dict[str, int], source: str) -> None:
    for item in message.field:
        if not item.type_name:
            continue
        full = _lookup(item.type_name, scope, kinds)
        if full is None:
            known = [name.rpartition(".")[2] for name in kinds]
            raise ConfigError(
                f"{source}: {message.name}.{item.name}: the type {item.type_name.lstrip('.')} is not defined."
                f"{did_you_mean(item.type_name, known)} Write a message of that name into the file"
            )
        item.type_name = full
        item.type = kinds[full]  # type: ignore[assignment]
    for nested in message.nested_type:
        _resolve(nested, f"{scope}.{nested.name}", kinds, source)


def _lookup(name: str, scope: str, kinds: dict[str, int]) -> str | None:
    candidates: Iterable[str] = [name]
    if not name.startswith("."):
        parts = scope.split(".")
        candidates = [f"{'.'.join(parts[:size])}.{name}" for size in range(len(parts), 0, -1)]
    return next((each for each in candidates if each in kinds), None)
