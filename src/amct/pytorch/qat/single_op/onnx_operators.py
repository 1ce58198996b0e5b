"""ONNX operators that a module can call while ``torch.onnx.export`` runs it.

Torch has them since 2.8, in ``torch.onnx.ops``. For older releases they are made here, with the same arguments, as one
operator of the captured program whose translation is the ONNX node.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

_IN_TORCH = hasattr(torch.onnx, "ops")
_EXPORTER = "torch.onnx._internal.exporter"


def is_exporting() -> bool:
    """Whether ``torch.onnx.export`` is running this module, by its exporter that captures programs."""
    if not torch.compiler.is_compiling():
        return False
    if _IN_TORCH:
        return torch.onnx.is_in_onnx_export()
    return not torch.compiler.is_dynamo_compiling() and _called_by_exporter()


def symbolic(
    name: str,
    inputs: Sequence[Tensor | None],
    attributes: Mapping[str, int],
    *,
    dtype: torch.dtype,
    shape: Sequence[int | torch.SymInt],
    version: int | None = None,
) -> Tensor:
    """A node with one result: ``name`` is the operator, ``domain::operator`` if it is not of ONNX itself."""
    return symbolic_multi_out(name, inputs, attributes, dtypes=[dtype], shapes=[shape], version=version)[0]


def symbolic_multi_out(
    name: str,
    inputs: Sequence[Tensor | None],
    attributes: Mapping[str, int],
    *,
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[int | torch.SymInt]],
    version: int | None = None,
) -> Sequence[Tensor]:
    """A node with several results; ``dtypes`` and ``shapes`` are theirs."""
    if _IN_TORCH:
        return torch.onnx.ops.symbolic_multi_out(
            name, inputs, dict(attributes), dtypes=dtypes, shapes=shapes, version=version
        )
    sizes = [size for shape in shapes for size in shape]
    ranks = [len(shape) for shape in shapes]
    types = [str(dtype).removeprefix("torch.") for dtype in dtypes]  # lists of types do not arrive as such
    results: Sequence[Tensor] = torch.ops.amct.onnx_node(
        name, inputs, list(attributes), list(attributes.values()), types, sizes, ranks, version
    )
    return results


# -- releases before 2.8 -----------------------------------------------------------------------------------------------


def _called_by_exporter() -> bool:
    """Older releases do not say that they export to ONNX: it is seen from the callers."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_EXPORTER):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _results(  # noqa: PLR0913  the arguments of the operator
    name: str,
    inputs: Sequence[Tensor | None],
    keys: Sequence[str],
    values: Sequence[int],
    dtypes: Sequence[str],
    sizes: Sequence[int | torch.SymInt],
    ranks: Sequence[int],
    version: int | None,
) -> list[Tensor]:
    """Tensors like the results, without values."""
    del name, keys, values, version
    device = next(each.device for each in inputs if each is not None)
    rest = iter(sizes)
    shapes = [[next(rest) for _ in range(rank)] for rank in ranks]
    types = [getattr(torch, dtype) for dtype in dtypes]
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, types, strict=True)]


def _node(  # noqa: PLR0913  the arguments of the operator
    name: str,
    inputs: Sequence[Any],
    keys: Sequence[str],
    values: Sequence[int],
    dtypes: Sequence[str],
    sizes: Sequence[Any],
    ranks: Sequence[int],
    version: int | None = None,
) -> Sequence[Any]:
    """The ONNX node, added to the graph that the exporter is building."""
    from onnxscript import evaluator, ir

    del sizes, ranks
    domain, _, operator = name.rpartition("::")
    attributes = [ir.AttrInt64(key, value) for key, value in zip(keys, values, strict=True)]
    given = list(inputs)
    while given and given[-1] is None:
        given.pop()
    node = ir.Node(domain, operator, given, attributes, num_outputs=len(dtypes), version=version)
    evaluator.default().nodes.append(node)  # type: ignore[attr-defined]
    return node.outputs


def _register() -> None:
    """Make the operator and its translation known to torch; ``torch.onnx.export`` reads its table when it begins."""
    from torch.onnx._internal.exporter._torchlib._torchlib_registry import onnx_impl

    torch.library.define(
        "amct::onnx_node",
        "(str name, Tensor?[] inputs, str[] keys, int[] values, str[] dtypes, SymInt[] sizes, int[] ranks,"
        " int? version) -> Tensor[]",
    )
    torch.library.register_fake("amct::onnx_node", _results)
    onnx_impl(torch.ops.amct.onnx_node.default, no_compile=True)(_node)


if not _IN_TORCH:
    _register()
