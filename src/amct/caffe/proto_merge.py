"""Merges a user's ``custom.proto`` with caffe.proto and AMCT's messages, as a file and at run time.

AMCT's layers use the LayerParameter numbers from 200000 on, and reserved names.

* A message name or a LayerParameter field of the user that AMCT uses: an error that names both.
* A LayerParameter number of the user that caffe.proto uses under another name: an error that names both.
* A message, or a LayerParameter field, of the same name as in caffe.proto: the user's is used, with a note.

A ``caffe_pb2.py`` that protoc made of a user's whole caffe.proto adds what is unknown here, and clashes with nothing.
"""

from __future__ import annotations

import ast
import logging
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from amct.atomic import write_text
from amct.caffe.engine.messages import layer_extensions
from amct.caffe.proto_language import read_proto, write_proto
from amct.errors import ConfigError, FileError, Problem, did_you_mean
from amct.schema import file_protos
from amct.schema.extension import with_extra_fields
from amct.schema.pool import numbered

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, MutableSequence

    from google.protobuf.descriptor import Descriptor
    from google.protobuf.descriptor_pb2 import EnumDescriptorProto

    from amct.caffe.engine.messages import ProtoMessage


logger = logging.getLogger(__name__)

LAYER = "LayerParameter"
#: The LayerParameter numbers of AMCT's quantization layers.
OWN_NUMBERS = range(200_000, 200_100)
#: Names that a user's file must not define, whether or not such a message exists here.
RESERVED = (
    "QuantParameter",
    "DeQuantParameter",
    "IFMRParameter",
    "LSTMQuantParameter",
    "SearchNParameter",
    "RetrainDataQuantParameter",
    "RetrainWeightQuantParameter",
    "SingleLayerRecord",
    "ScaleOffsetRecord",
)


@dataclass(frozen=True)
class MergeResult:
    """The merged file, and notes for the user."""

    file: FileDescriptorProto
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CustomSchema:
    """The merged messages, ready to read prototxt files."""

    result: MergeResult

    @classmethod
    def of(cls, message: ProtoMessage) -> CustomSchema:
        """The schema of a message that was read with a custom.proto."""
        file = FileDescriptorProto()
        message.DESCRIPTOR.file.CopyToProto(file)
        return cls(MergeResult(file))

    @cached_property
    def _pool(self) -> DescriptorPool:
        pool = DescriptorPool()
        pool.AddSerializedFile(self.result.file.SerializeToString())
        return pool

    def descriptor(self, name: str) -> Descriptor:
        """The descriptor of a message: ``descriptor("NetParameter")``."""
        return self._pool.FindMessageTypeByName(f"caffe.{name}")

    def new_message(self, message: str, /, **fields: object) -> ProtoMessage:
        """A message of the merged schema."""
        return GetMessageClass(self.descriptor(message))(**fields)


def load_custom_schema(custom: str | os.PathLike[str]) -> CustomSchema:
    """Merge a custom.proto with this package's caffe.proto, to run nets that use its messages.

    Raises:
        FileError, ParseError, ConfigError: It cannot be read, is not a .proto file, or conflicts.
    """
    return CustomSchema(merge(_read(custom), _ours()))


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
        joined = _ours()
        joined.name = "merged.proto"
        _extend(joined, found)
        try:
            schema = CustomSchema(MergeResult(joined))
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
            if file.package == "caffe" and _message(file, LAYER) is not None:
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
    custom: str | os.PathLike[str], output: str | os.PathLike[str], caffe: str | os.PathLike[str] | None = None
) -> MergeResult:
    """Merge a custom.proto with a caffe.proto (by default this package's) and AMCT's layers, and write the result.

    Raises:
        FileError, ParseError, ConfigError: A file cannot be read or written, is not a .proto file, or conflicts.
    """
    base = _ours() if caffe is None else _with_own_layers(_read(caffe))
    result = merge(_read(custom), base)
    write_text(output, write_proto(result.file))
    return result


def merge(custom: FileDescriptorProto, base: FileDescriptorProto) -> MergeResult:
    """Merge two parsed files; ``base`` is caffe.proto with AMCT's layers.

    Raises:
        ConfigError: They conflict; all conflicts are listed.
    """
    problems = [*_clashes_with_own(custom, base), *_clashing_numbers(custom, base)]
    if problems:
        raise ConfigError.from_problems(problems)
    joined = FileDescriptorProto()
    joined.CopyFrom(base)
    joined.name = "merged.proto"
    notes = [*_join_layer_fields(joined, _layer_fields(custom)), *_join_types(joined, custom)]
    for note in notes:
        logger.info("%s", note)
    resolve_types(joined, custom.name)
    return MergeResult(joined, notes)


def _read(path: str | os.PathLike[str]) -> FileDescriptorProto:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: cannot be read: {error}") from error
    return read_proto(text, str(path))


def _ours() -> FileDescriptorProto:
    (file,) = file_protos("caffe")
    return with_extra_fields(file, layer_extensions())


def _message(file: FileDescriptorProto, name: str) -> DescriptorProto | None:
    return next((message for message in file.message_type if message.name == name), None)


def _layer_fields(file: FileDescriptorProto) -> list[FieldDescriptorProto]:
    layer = _message(file, LAYER)
    return list(layer.field) if layer is not None else []


def _own_fields(file: FileDescriptorProto) -> list[FieldDescriptorProto]:
    return [item for item in _layer_fields(file) if item.number in OWN_NUMBERS]


def _with_own_layers(base: FileDescriptorProto) -> FileDescriptorProto:
    """Add AMCT's layers to a user's caffe.proto."""
    layer = _message(base, LAYER)
    if layer is None:
        raise ConfigError(f"{base.name}: not a caffe.proto: it has no message {LAYER}")
    ours = _ours()
    base.package = ours.package
    known = {item.name for item in layer.field}
    for item in _own_fields(ours):
        message = _message(ours, item.type_name.rpartition(".")[2])
        if item.name not in known and message is not None:
            layer.field.add().CopyFrom(item)
            if _message(base, message.name) is None:
                base.message_type.add().CopyFrom(message)
    return base


def _clashes_with_own(custom: FileDescriptorProto, base: FileDescriptorProto) -> Iterable[Problem]:
    own = _own_fields(base)
    taken = {*RESERVED, *(item.type_name.rpartition(".")[2] for item in own)}
    for message in custom.message_type:
        if message.name in taken:
            yield Problem(
                f"{custom.name}: message {message.name} clashes with AMCT's own message {message.name}: give yours "
                "another name"
            )
    for item in _layer_fields(custom):
        for other in own:
            if item.name == other.name or item.number == other.number:
                yield Problem(
                    f"{custom.name}: {LAYER} field {item.name} = {item.number} clashes with AMCT's own field "
                    f"{other.name} = "
                    f"{other.number}: give yours another {'name' if item.name == other.name else 'number'}"
                )


def _clashing_numbers(custom: FileDescriptorProto, base: FileDescriptorProto) -> Iterable[Problem]:
    for item in _layer_fields(custom):
        for other in _layer_fields(base):
            if item.number == other.number and item.name != other.name and other.number not in OWN_NUMBERS:
                yield Problem(
                    f"{custom.name}: {LAYER} field {item.name} = {item.number} has the number of caffe.proto's field "
                    f"{other.name} = {other.number}: give yours another number, best one below 5000 that is free"
                )


def _join_layer_fields(joined: FileDescriptorProto, fields: list[FieldDescriptorProto]) -> Iterable[str]:
    layer = _message(joined, LAYER)
    assert layer is not None, "caffe.proto has LayerParameter"
    for item in fields:
        for index, other in enumerate(layer.field):
            if other.name == item.name:
                del layer.field[index]
                if other.number != item.number:
                    yield (
                        f"{LAYER} field {item.name} = {item.number} of the custom proto replaces caffe.proto's "
                        f"{other.name} = {other.number}"
                    )
                break
        layer.field.add().CopyFrom(item)


def _join_types(joined: FileDescriptorProto, custom: FileDescriptorProto) -> Iterable[str]:
    for message in custom.message_type:
        if message.name == LAYER:
            continue
        if _remove(joined.message_type, message.name):
            yield f"message {message.name} of the custom proto replaces the one in caffe.proto"
        joined.message_type.add().CopyFrom(message)
    for enum in custom.enum_type:
        if _remove(joined.enum_type, enum.name):
            yield f"enum {enum.name} of the custom proto replaces the one in caffe.proto"
        joined.enum_type.add().CopyFrom(enum)


def _remove(items: MutableSequence[Any], name: str) -> bool:
    for index, item in enumerate(items):
        if item.name == name:
            del items[index]
            return True
    return False


def resolve_types(file: FileDescriptorProto, source: str) -> None:
    """Replace type names by full names, in place, and set whether each is a message or an enum.

    Raises:
        ConfigError: The type of a field is not defined.
    """
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
    if name.startswith("."):
        return name if name in kinds else None
    while scope:
        candidate = f"{scope}.{name}"
        if candidate in kinds:
            return candidate
        scope = scope.rpartition(".")[0]
    return f".{name}" if f".{name}" in kinds else None
