"""Conversion of binary files to messages, with the errors of this package instead of protobuf's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from amct.errors import ArgumentTypeError, ParseError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.descriptor import FieldDescriptor
    from google.protobuf.message import Message

_MessageT = TypeVar("_MessageT", bound="Message")


def read_binary(data: bytes, message_class: type[_MessageT], source: str) -> _MessageT:
    """Read a message in protobuf's binary format; ``source`` is the file's name for the error.

    Raises:
        ParseError: The bytes are not such a message: broken, of another kind, or without a required field.
        ArgumentTypeError: ``data`` is not bytes.
    """
    from google.protobuf.message import DecodeError

    if not isinstance(data, bytes | bytearray | memoryview):
        raise ArgumentTypeError(f"data must be bytes, got {type(data).__name__}")
    name = message_class.DESCRIPTOR.full_name
    message = message_class()
    try:
        message.ParseFromString(bytes(data))
        _refuse_broken_names(message)
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ParseError(f"{source}: not a binary {name}: {error}; is the file cut off, or text?") from error
    if data and not message.ListFields():
        raise ParseError(f"{source}: nothing in it is a field of {name}; is it another kind of file?")
    if not message.IsInitialized():
        missing: list[str] = message.FindInitializationErrors()  # type: ignore[attr-defined]  # not in the stubs
        raise ParseError(f"{source}: a {name} needs {', '.join(missing)}")
    return message


def _refuse_broken_names(message: Message) -> None:
    """Check every string: some protobuf runtimes silently return bytes where a string is not UTF-8."""
    pending: list[Message] = [message]
    while pending:
        for field, value in pending.pop().ListFields():
            if field.message_type is None:
                if field.type == field.TYPE_STRING:
                    for text in [value] if isinstance(value, str | bytes) else value:
                        if isinstance(text, bytes):
                            text.decode("utf-8")
            elif hasattr(value, "DESCRIPTOR"):
                pending.append(value)
            else:
                pending.extend(_inner_messages(field, value))


def _inner_messages(field: FieldDescriptor, value: Any) -> Iterable[Message]:  # noqa: ANN401 - a protobuf container
    if field.message_type is None or not field.message_type.GetOptions().map_entry:
        messages: Iterable[Message] = value
        return messages
    return value.values() if field.message_type.fields_by_name["value"].message_type else ()
