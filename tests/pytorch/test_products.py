"""A product with a weight of any axes is a linear layer, or a convolution with groups, between arrangements."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.nn import functional

from amct.pytorch.capture.functional_calls import functional_calls
from amct.pytorch.capture.products import own_rows

SIZES = dict(zip("abcdefgh", (2, 3, 4, 5, 2, 3, 1, 4), strict=True))


def computed(call):
    """The call by the layer that it is said to be."""
    if call.product is None:
        return functional.linear(call.input, call.weight.t() if call.columns else call.weight, call.bias)
    rows = call.product.rows(call.weight)
    operation = functional.conv1d if call.type == "Conv1d" else functional.linear
    return call.run(lambda x: operation(x, rows, **dict(call.settings)))


def check(function, *args, **kwargs):
    expected = function(*args, **kwargs)
    calls = functional_calls(function, args, kwargs)
    for call in calls:
        torch.testing.assert_close(computed(call), expected, rtol=1e-12, atol=1e-12)
    return len(calls)


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@st.composite
def equations(draw):
    """Two terms with common axes, of which at least one is summed over."""
    axes = draw(st.permutations("abcdefgh"))
    summed, shared, one, two = (axes[:1], axes[1:2], axes[2:4], axes[4:6])
    shared, one, two = (part[: draw(st.integers(0, len(part)))] for part in (shared, one, two))
    first = draw(st.permutations([*summed, *shared, *one]))
    second = draw(st.permutations([*summed, *shared, *two]))
    result = draw(st.permutations([*shared, *one, *two]))
    return "".join(first), "".join(second), "".join(result)


@given(equations())
def test_einsum_is_a_layer_with_either_operand_as_weight(equation):
    first, second, result = equation
    operands = [numbers(*(SIZES[axis] for axis in term)) for term in (first, second)]
    assert check(torch.einsum, f"{first},{second}->{result}", *operands) == 2


@given(st.lists(st.sampled_from([1, 2]), max_size=2), st.lists(st.sampled_from([1, 2]), max_size=2))
def test_matmul_is_a_layer_whatever_is_broadcast(batch, other):
    assert check(torch.matmul, numbers(*batch, 3, 4), numbers(*other, 4, 5)) == 2


@pytest.mark.parametrize(
    ("function", "operands"),
    [
        pytest.param(torch.einsum, ("...k,kn->...n", numbers(2, 3, 4), numbers(4, 5)), id="einsum with an ellipsis"),
        pytest.param(torch.einsum, ("ij,jk", numbers(2, 3), numbers(3, 4)), id="einsum without a result"),
        pytest.param(torch.einsum, ("ij,jk->ik", [numbers(2, 3), numbers(3, 4)]), id="einsum of a list"),
        pytest.param(torch.bmm, (numbers(2, 3, 4), numbers(2, 4, 5)), id="bmm"),
        pytest.param(torch.baddbmm, (numbers(2, 3, 5), numbers(2, 3, 4), numbers(2, 4, 5)), id="baddbmm"),
        pytest.param(torch.addmm, (numbers(3, 5), numbers(3, 4), numbers(4, 5)), id="addmm with a bias for each value"),
        pytest.param(torch.addmm, (numbers(5), numbers(3, 4), numbers(4, 5)), id="addmm"),
        pytest.param(torch.tensordot, (numbers(2, 3, 4), numbers(3, 4, 5)), id="tensordot"),
        pytest.param(torch.matmul, (numbers(4), numbers(2, 4, 5)), id="a vector"),
    ],
)
def test_functions_of_products_are_layers(function, operands):
    assert check(function, *operands) >= 1


@pytest.mark.parametrize("equation", ["ii,ij->j", "ij,jk->i", "ij,kl->ijkl", "i,i,i->i"])
def test_what_is_no_product_with_a_weight_is_no_layer(equation):
    terms = equation.partition("->")[0].split(",")
    assert not functional_calls(torch.einsum, (equation, *(numbers(*[3] * len(term)) for term in terms)), {})


@given(st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_each_row_takes_the_result_of_its_expert(counts):
    made = numbers(sum(counts), 3, 2)
    found = own_rows(made, torch.tensor(counts).cumsum(0))
    experts = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    assert torch.equal(found, made[torch.arange(sum(counts)), experts])
