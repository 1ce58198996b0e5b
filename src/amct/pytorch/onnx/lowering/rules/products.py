"""Rules of matrix products."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.pytorch.onnx.lowering.registry import NotLoweredError, rule

if TYPE_CHECKING:
    from amct.pytorch.onnx.lowering.writer import Number, Value, Writer


@rule("linear")
def linear(to: Writer, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """Gemm for a matrix; MatMul with the transposed weight, and Add, otherwise."""
    if x.rank == 2:
        return to.add("Gemm", x, weight, bias, transB=1)
    product = to.add("MatMul", x, transposed(to, weight))
    return product if bias is None else to.binary("Add", product, bias)


def transposed(to: Writer, x: Value) -> Value:
    """The last two axes exchanged; of a small constant at once."""
    if x.rank < 2:
        return x
    if x.constant is not None:
        return to.constant(x.constant.transpose(-1, -2).contiguous())
    return to.transpose(x, [*range(x.rank - 2), x.rank - 1, x.rank - 2])


@rule("matmul", "mm", "bmm", "mv", "dot")
def product(
    to: Writer,
    x: Value,
    other: Value | None = None,
    mat2: Value | None = None,
    vec: Value | None = None,
    tensor: Value | None = None,
) -> Value:
    """A product with the broadcasting of NumPy."""
    second = next(each for each in (other, mat2, vec, tensor) if each is not None)
    return to.add("MatMul", x, second)


@rule("addmm")
def sum_with_product(to: Writer, x: Value, mat1: Value, mat2: Value, beta: Number = 1, alpha: Number = 1) -> Value:
    """``beta · x + alpha · mat1 @ mat2``."""
    return to.add("Gemm", mat1, mat2, x, alpha=float(alpha), beta=float(beta))


@rule("baddbmm")
def sum_with_products(to: Writer, x: Value, batch1: Value, batch2: Value, beta: Number = 1, alpha: Number = 1) -> Value:
    """``beta · x + alpha · batch1 @ batch2``; with a beta of 0, x is not read."""
    product = to.add("MatMul", batch1, batch2)
    if alpha != 1:
        product = to.mul(product, to.constant(alpha))
    if beta == 0:
        return product
    return to.binary("Add", product, x if beta == 1 else to.mul(x, to.constant(beta)))


@rule("einsum")
def einsum(to: Writer, equation: str, tensors: list[Value]) -> Value:
    """A sum of products in Einstein's notation."""
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise NotLoweredError("einsum of several types")
    return to.add("Einsum", *tensors, equation=equation.replace(" ", ""))
