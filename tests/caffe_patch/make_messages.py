"""Writes C++ classes for messages, with the methods of protobuf that the layers use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from caffe_patch.merge_proto import merge

KINDS = {
    "double": "double", "float": "float", "int32": "int32_t", "int64": "int64_t", "uint32": "uint32_t",
    "bool": "bool", "string": "std::string", "bytes": "std::string",
}  # fmt: skip

HEAD = """// Made by make_messages.py.
#pragma once
#include "messages.hpp"
namespace caffe {
"""

FIELD = """
  bool has_{name}() const {{ return has_{name}_; }}
  const {kind}& {name}() const {{ return {name}_; }}
  void clear_{name}() {{ has_{name}_ = false; {name}_ = {default}; }}
  {kind}* mutable_{name}() {{ has_{name}_ = true; return &{name}_; }}
"""
SETTER = "  void set_{name}(const {kind}& value) {{ *mutable_{name}() = value; }}\n"
REPEATED = """
  int {name}_size() const {{ return {name}_.size(); }}
  const {kind}& {name}(int i) const {{ return {name}_.at(i); }}
  const small::Repeated<{kind}>& {name}() const {{ return {name}_; }}
  small::Repeated<{kind}>* mutable_{name}() {{ return &{name}_; }}
  {kind}* mutable_{name}(int i) {{ return &{name}_.at(i); }}
  void clear_{name}() {{ {name}_.clear(); }}
"""
ADDER = "  void add_{name}(const {kind}& value) {{ {name}_.push_back(value); }}\n"
MAKER = "  {kind}* add_{name}() {{ {name}_.emplace_back(); return &{name}_.back(); }}\n"


def messages_of(file: merge.ProtoFile) -> str:
    """The header for a parsed .proto file."""
    enums = [
        f"enum {enum.name} {{ {', '.join(f'{name} = {number}' for name, number in enum.values)} }};"
        for enum in file.enums
    ]
    names = {enum.name for enum in file.enums}
    waiting, classes = list(file.messages), []
    while waiting:
        needed = {message.name for message in waiting}
        ready = [each for each in waiting if not needed & _kinds(each)]
        assert ready, needed
        classes += [_class(message, names) for message in ready]
        waiting = [each for each in waiting if each not in ready]
    return HEAD + "\n".join([*enums, *classes]) + "\n}  // namespace caffe\n"


def _kinds(message: merge.Message) -> set[str]:
    return {field.kind for each in (message, *message.messages) for field in each.fields}


def _class(message: merge.Message, enums: set[str]) -> str:
    inner = "".join(_class(each, enums) for each in message.messages)
    parts, members, reads, writes, packs = [], [], [], [], []
    for field in message.fields:
        is_enum, is_message = field.kind in enums, field.kind not in KINDS and field.kind not in enums
        kind = KINDS.get(field.kind, field.kind)
        default = field.options.get("default", '""' if kind == "std::string" else "0")
        values = {"name": field.name, "kind": kind, "default": f"{kind}()" if is_message else f"{kind}({default})"}
        repeated = field.label == "repeated"
        parts.append((REPEATED if repeated else FIELD).format(**values))
        if repeated:
            parts.append((MAKER if is_message else ADDER).format(**values))
            members.append(f"  small::Repeated<{kind}> {field.name}_;\n")
        else:
            parts.append("" if is_message else SETTER.format(**values))
            members.append(f"  {kind} {field.name}_ = {values['default']};\n  bool has_{field.name}_ = false;\n")
        reads.append(_reading(field, kind, is_message, is_enum))
        each = "each" if repeated else f"{field.name}_"
        loop = f"for (const auto& each : {field.name}_)" if repeated else f"if (has_{field.name}_)"
        if is_message:
            text = f'indent + "{field.name} {{\\n" + {each}.DebugString(indent + "  ") + indent + "}}\\n"'
            packed = f"small::Bytes({field.number}, {each}.SerializeAsString())"
        else:
            shown = f'({each} == 0 ? "TRAIN" : "TEST")' if is_enum else f"small::Text({each})"
            text = f'indent + "{field.name}: " + {shown} + "\\n"'
            packed = f"small::Bytes({field.number}, {f'int32_t({each})' if is_enum else each})"
        writes.append(f"    {loop} text += {text};\n")
        packs.append(f"    {loop} bytes += {packed};\n")
    return f"""
class {message.name} {{
 public:
{inner}{"".join(parts)}
  void Clear() {{ *this = {message.name}(); }}
  void CopyFrom(const {message.name}& other) {{ *this = other; }}
  void Parse(small::Words* words) {{
    while (!words->AtEnd() && words->Peek() != "}}") {{
      const std::string name = words->Next();
{"".join(reads)}      throw std::runtime_error("{message.name} has no field named " + name);
    }}
  }}
  std::string DebugString(const std::string& indent = "") const {{
    std::string text;
{"".join(writes)}    return text;
  }}
  std::string SerializeAsString() const {{
    std::string bytes;
{"".join(packs)}    return bytes;
  }}

 private:
{"".join(members)}}};
"""


def _reading(field: merge.Field, kind: str, is_message: bool, is_enum: bool) -> str:
    place = f"&{field.name}_.back()" if field.label == "repeated" else f"mutable_{field.name}()"
    grow = f"{field.name}_.emplace_back();" if field.label == "repeated" else ""
    if is_message:
        body = f'words->Accept(":"); words->Accept("{{"); {grow} ({place})->Parse(words); words->Next();'
    elif is_enum:
        body = f'words->Accept(":"); *{place} = words->Next() == "TEST" ? {kind}(1) : {kind}(0);'
    else:
        body = f'words->Accept(":"); {grow} small::Read(words, {place});'
    return f'      if (name == "{field.name}") {{ {body} continue; }}\n'
