"""Finds modules that run in forward for nothing: no output of the model depends on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import fx
    from torch.export import ExportedProgram


def unused_modules(program: ExportedProgram) -> frozenset[str]:
    """The modules none of whose operations reaches an output.

    An exported file does not have them, so there is nothing to quantize: the pooler of a BERT whose hidden state alone
    is used is the usual case. What is written in place, and what holds a program of its own, counts as used.
    """
    live: set[fx.Node] = set()
    used: set[str] = set()
    called: set[str] = set()
    for node in reversed(program.graph.nodes):
        if _has_effect(node) or any(user in live for user in node.users):
            live.add(node)
        if node.op == "call_function":
            stack = node.meta.get("nn_module_stack") or {}
            paths = {str(path).partition("@")[0] for path, _ in stack.values()}
            called |= paths
            if node in live:
                used |= paths
    return frozenset(called - used)


def _has_effect(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op == "output"
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    return getattr(node.target, "__name__", "") != "getitem"
