"""Rewrites a captured program so that its readers and torch.onnx meet plain operations and harmless names.

Regions (autocast, gradient mode) become part of the graph around them. Parameter names that torch's generated code
cannot contain, such as one with a quote, are escaped; ``plain_name`` is the inverse.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_REGIONS = frozenset({"wrap_with_autocast", "wrap_with_set_grad_enabled"})

_ESCAPE_BASE = 0xE000  # Unicode's private use area
_ESCAPED = {code: _ESCAPE_BASE + code for code in (*range(32), ord('"'), ord("\\"), 127)}
_PLAIN = {escape: code for code, escape in _ESCAPED.items()}


def plain_name(name: str) -> str:
    """The name in the user's model of a parameter or buffer of a rewritten program."""
    return name.translate(_PLAIN)


def rewrite(program: ExportedProgram) -> None:
    """Inline the regions and escape the names, in place."""
    _inline_regions(program)
    _escape_names(program)


# -- regions -----------------------------------------------------------------------------------------------------------


def _inline_regions(program: ExportedProgram) -> None:
    """Replace every region by its operations.

    Gradients do not matter here. In an autocast region the operations then compute in the types of their inputs: a
    disabled region is unchanged, an enabled one becomes more exact.
    """
    renamed = _inline_into(program.graph_module)
    if not renamed:
        return
    for old, new in renamed.items():
        program.graph_signature.replace_all_uses(old, new)
    for node in list(program.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:  # states the lower type of a region's result
            program.graph.erase_node(node)
    program.graph.lint()
    program.graph_module.recompile()


def _inline_into(module: fx.GraphModule) -> dict[str, str]:
    """Inline the regions of one graph; returns the new name of each result."""
    renamed: dict[str, str] = {}
    for node in list(module.graph.nodes):
        if node.op != "call_function" or getattr(node.target, "__name__", "") not in _REGIONS:
            continue
        body = next(argument for argument in node.args if isinstance(argument, fx.Node))  # settings come before it
        inner = module.get_submodule(str(body.target))
        assert isinstance(inner, fx.GraphModule)
        _inline_into(inner)
        results = _copied_operations(module, inner, node, node.args[node.args.index(body) + 1 :])
        for user in list(node.users):
            assert user.target is operator.getitem
            result = results[user.args[1]]
            renamed[user.name] = result.name
            user.replace_all_uses_with(result)
            module.graph.erase_node(user)
        module.graph.erase_node(node)
        if not body.users:
            module.graph.erase_node(body)
    return renamed


def _copied_operations(module: fx.GraphModule, inner: fx.GraphModule, before: fx.Node, arguments: Any) -> Any:  # noqa: ANN401  the nodes of a tuple
    """Copy the operations of an inner graph in front of a node; returns the copies of its results."""
    placeholders = inner.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = dict(zip(placeholders, arguments, strict=True))
    with module.graph.inserting_before(before):
        for node in inner.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], lambda argument: copies[argument])
            if node in copies:
                continue
            copy = module.graph.node_copy(node, lambda argument: copies[argument])
            copy.meta.pop("from_node", None)  # torch.onnx follows the origin of a node up to this program
            if node.op == "get_attr":
                copy.target = _moved_attribute(module, inner, str(node.target))
            copies[node] = copy
    raise AssertionError("a graph ends with its output")


def _moved_attribute(module: fx.GraphModule, inner: fx.GraphModule, name: str) -> str:
    """Give an attribute of an inner graph to the outer one, under a free name."""
    free = name
    while hasattr(module, free):
        free = f"{free}_inner"
    setattr(module, free, getattr(inner, name))
    return free


# -- names -------------------------------------------------------------------------------------------------------------


def _escape_names(program: ExportedProgram) -> None:
    """Escape the names of parameters, buffers and constants."""
    stored = (program.state_dict, program.constants)
    names = {name for entries in stored for name in entries}
    escapes = {name: name.translate(_ESCAPED) for name in names if name.translate(_ESCAPED) != name}
    if not escapes:
        return
    for entries in stored:
        for name in [name for name in entries if name in escapes]:
            entries[escapes[name]] = entries.pop(name)
    signature = program.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        if spec.target in escapes:
            spec.target = escapes[spec.target]
