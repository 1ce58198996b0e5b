"""Every lowering rule against torch: results, types and shapes, over the forms in which programs call an operator."""

from __future__ import annotations

import onnx
import pytest
import torch
from lowering_check import check
from torch import nn
from torch.nn import functional

from amct.export.onnx.runtimes import count_integer_kernels


def values(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    return torch.empty(shape).uniform_(low, high, generator=torch.Generator().manual_seed(seed))


def whole(*shape: int, low: int = -5, high: int = 6) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1))


def without_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x == 0, torch.ones_like(x), x)


IMAGE = values(2, 4, 9, 8)
MATRIX = values(3, 6)
CUBE = values(2, 3, 4)

FUNCTIONS = [
    torch.exp, torch.sin, torch.cos, torch.tan, torch.atan, torch.sinh, torch.cosh, torch.asinh, torch.erf,
    torch.sigmoid,
    torch.tanh, torch.abs, torch.neg, torch.sign, torch.floor, torch.ceil, torch.round, torch.trunc, torch.square,
    torch.exp2, torch.relu, functional.relu6, functional.silu, functional.gelu, functional.hardswish,
    functional.hardsigmoid, functional.hardtanh, functional.leaky_relu, functional.elu, functional.selu,
    functional.celu,
    functional.softplus, functional.mish, functional.softsign, functional.logsigmoid, torch.isnan, torch.isinf,
    torch.logical_not, torch.clone, torch.Tensor.contiguous,
]  # fmt: skip
POSITIVE = [torch.log, torch.sqrt, torch.rsqrt, torch.log2, torch.log10, torch.log1p, torch.reciprocal, torch.expm1]
INSIDE = [torch.asin, torch.acos, torch.atanh]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
def test_functions(function):
    check(lambda x: function(x), torch.cat([values(3, 5), values(1, 5) * 20]))


@pytest.mark.parametrize("function", POSITIVE, ids=lambda each: each.__name__)
def test_functions_of_positive_values(function):
    check(lambda x: function(x), values(3, 5, low=0.1))


@pytest.mark.parametrize("function", INSIDE, ids=lambda each: each.__name__)
def test_functions_of_values_below_one(function):
    check(lambda x: function(x), values(3, 5, low=-0.9, high=0.9))


@pytest.mark.parametrize(
    "function", [torch.abs, torch.neg, torch.sign, torch.floor, torch.relu, torch.exp, torch.sqrt, torch.bitwise_not]
)
def test_functions_of_integers(function):
    check(lambda x: function(x), whole(3, 5, low=0) if function is torch.sqrt else whole(3, 5))


ARITHMETIC = {
    "add": lambda x, y: x + y,
    "add_scaled": lambda x, y: torch.add(x, y, alpha=3),
    "subtract": lambda x, y: x - y,
    "subtract_scaled": lambda x, y: torch.sub(x, y, alpha=0.5) if x.is_floating_point() else x - y,
    "reversed": lambda x, y: 3 - x + y,
    "reversed_scaled": lambda x, y: torch.rsub(x, y, alpha=2),
    "multiply": lambda x, y: x * y * 2,
    "divide": lambda x, y: x / without_zero(y),
    "divide_down": lambda x, y: torch.div(x, without_zero(y), rounding_mode="floor"),
    "divide_to_zero": lambda x, y: torch.div(x, without_zero(y), rounding_mode="trunc"),
    "whole_division": lambda x, y: x // without_zero(y),
    "remainder": lambda x, y: x % without_zero(y),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "power": lambda x, y: torch.abs(x) ** y.clamp(0, 3),
    "power_of_number": lambda x, y: 2 ** x.clamp(0, 4) + y,
    "power_by_number": lambda x, y: x**2 + y,
    "equal": lambda x, y: (x == y) | (x != y),
    "order": lambda x, y: (x < y) & (x <= y) ^ (x > y) | (x >= y),
    "number": lambda x, y: (x > 1) & (y != 0),
    "where": lambda x, y: torch.where(x > y, x, y),
    "where_number": lambda x, y: torch.where(x > 0, x, 0.5) + torch.where(y > 0, 1, y),
    "masked": lambda x, y: x.masked_fill(y > 0, -7),
    "logical": lambda x, y: torch.logical_and(x, y) | torch.logical_xor(x, y) | torch.logical_or(x, y),
    "clamp_tensor": lambda x, y: torch.clamp(x, y, y + 1),
    "truth_times": lambda x, y: (x > 0) * (y > 0) * x,
}  # fmt: skip


@pytest.mark.parametrize("kinds", ["float float", "int int", "float int", "int float", "number"])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_promotes_types_as_torch_does(name, kinds):
    if name == "reversed_scaled" and kinds != "float float":
        kinds = "int int"
    one, two = whole(4, 5), whole(4, 5).flip(0)
    tensors = {
        "float float": (values(4, 5), values(5, seed=3)),
        "int int": (one, two),
        "float int": (values(4, 1), two),
        "int float": (one, values(4, 5)),
        "number": (values(4, 5).double(), torch.tensor(2)),
    }[kinds]
    check(ARITHMETIC[name], *tensors)


ELEMENTWISE = {
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_low": lambda x: x.clamp(min=0.5),
    "clamp_high": lambda x: x.clamp_max(0.5),
    "clamp_min": lambda x: x.clamp_min(-0.5),
    "hardtanh": lambda x: functional.hardtanh(x, -0.5, 1.5),
    "leaky": lambda x: functional.leaky_relu(x, 0.2),
    "rrelu": lambda x: functional.rrelu(x, 0.1, 0.4),
    "elu": lambda x: functional.elu(x, 0.7),
    "celu": lambda x: functional.celu(x, 0.7),
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "softplus": lambda x: functional.softplus(x, beta=2),
    "softmax": lambda x: functional.softmax(x, 1),
    "softmax_negative": lambda x: functional.softmax(x, -2),
    "softmax_double": lambda x: functional.softmax(x, -1, dtype=torch.float64),
    "log_softmax": lambda x: functional.log_softmax(x, 0),
    "glu": lambda x: functional.glu(x, 1),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 1, value=-0.5),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3) + torch.lerp(x, x * 2, x),
    "to_int": lambda x: x.to(torch.int32) + x.long(),
    "to_half": lambda x: x.half(),
    "to_bool": lambda x: x.bool(),
    "type_as": lambda x: (x > 0).type_as(x),
    "dropout": lambda x: functional.dropout(x, 0.5, training=False),
    "in_place": lambda x: (x * 2).relu_().add_(1).clamp_(0, 2),
    "in_place_view": lambda x: (x * 2).view(-1).relu_(),
    "half_in_place": lambda x: x.half().add_(x.exp()),
    "bits": lambda x: x.int() & 3 | 4,
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name):
    check(ELEMENTWISE[name], values(3, 4, 6))


@pytest.mark.parametrize("opset", [18, 20])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_one_node_from_opset_20_on(opset, approximate):
    model = check(lambda x: functional.gelu(x, approximate=approximate), values(3, 4), opset=opset)
    assert ("Gelu" in [node.op_type for node in model.graph.node]) == (opset >= 20)


def test_rrelu_is_a_leaky_relu_with_the_mean_slope():
    [node] = check(nn.RReLU(0.1, 0.5), values(3, 4)).graph.node
    assert (node.op_type, node.attribute[0].f) == ("LeakyRelu", pytest.approx(0.3))


def test_gelu_of_several_nodes_is_one_kernel_in_onnxruntime(tmp_path):
    model = check(functional.gelu, values(3, 4), opset=17)
    onnx.save(model, tmp_path / "gelu.onnx")
    assert count_integer_kernels(tmp_path / "gelu.onnx").operators == {"Gelu": 1}


# -- layers ------------------------------------------------------------------------------------------------------------

LAYERS = {
    "conv1d": (nn.Conv1d(3, 5, 3, stride=2, padding=1), values(2, 3, 9)),
    "conv2d": (nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(1, 2), groups=2), IMAGE),
    "conv2d_without_bias": (nn.Conv2d(4, 4, 3, groups=4, bias=False), IMAGE),
    "conv2d_same": (nn.Conv2d(4, 3, (4, 3), padding="same", dilation=2), IMAGE),
    "conv2d_valid": (nn.Conv2d(4, 3, 2, padding="valid"), IMAGE),
    "conv2d_reflect": (nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"), IMAGE),
    "conv2d_without_batch": (nn.Conv2d(4, 3, 3), IMAGE[0]),
    "conv3d": (nn.Conv3d(2, 3, (1, 2, 3), padding=(0, 1, 1)), values(1, 2, 4, 5, 6)),
    "transposed1d": (nn.ConvTranspose1d(3, 4, 3, stride=2, output_padding=1), values(2, 3, 5)),
    "transposed2d": (nn.ConvTranspose2d(4, 6, 3, 2, padding=1, output_padding=(1, 0), groups=2, dilation=2), IMAGE),
    "transposed3d": (nn.ConvTranspose3d(2, 2, 2, stride=2, bias=False), values(1, 2, 2, 3, 2)),
    "linear1": (nn.Linear(6, 4), values(6)),
    "linear2": (nn.Linear(6, 4), MATRIX),
    "linear2_without_bias": (nn.Linear(6, 4, bias=False), MATRIX),
    "linear3": (nn.Linear(4, 5), CUBE),
    "batch_norm1": (nn.BatchNorm1d(6), MATRIX),
    "batch_norm2": (nn.BatchNorm2d(4, affine=False), IMAGE),
    "batch_norm3": (nn.BatchNorm3d(2), values(1, 2, 2, 3, 2)),
    "layer_norm": (nn.LayerNorm([4]), CUBE),
    "layer_norm2": (nn.LayerNorm([3, 4], eps=1e-3), CUBE),
    "layer_norm_without_bias": (nn.LayerNorm([4], bias=False), CUBE),
    "layer_norm_plain": (nn.LayerNorm([4], elementwise_affine=False), CUBE),
    "group_norm": (nn.GroupNorm(2, 4), IMAGE),
    "group_norm_plain": (nn.GroupNorm(4, 4, affine=False), IMAGE),
    "instance_norm": (nn.InstanceNorm2d(4, affine=True), IMAGE),
    "instance_norm_plain": (nn.InstanceNorm1d(3), CUBE),
    "instance_norm_tracked": (nn.InstanceNorm2d(4, track_running_stats=True), IMAGE),
    "rms_norm": (nn.RMSNorm([4]), CUBE),
    "rms_norm_epsilon": (nn.RMSNorm([3, 4], eps=1e-3, elementwise_affine=False), CUBE),
    "prelu": (nn.PReLU(4), IMAGE),
    "prelu_one": (nn.PReLU(), IMAGE),
    "prelu_matrix": (nn.PReLU(6), MATRIX),
    "embedding": (nn.Embedding(9, 4, padding_idx=0), whole(2, 5, low=0, high=9)),
    "upsample": (nn.Upsample(scale_factor=2), IMAGE),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True), values(2, 5, 8)),
    "pixel_shuffle": (nn.PixelShuffle(2), IMAGE),
    "pixel_unshuffle": (nn.PixelUnshuffle(2), values(2, 3, 4, 6)),
    "channel_shuffle": (nn.ChannelShuffle(2), IMAGE),
}


def lively(module: nn.Module) -> nn.Module:
    """With parameters and statistics that are neither 0 nor 1."""
    generator = torch.Generator().manual_seed(5)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point():
            low = 0.5 if "var" in name else -0.5
            with torch.no_grad():
                tensor.uniform_(low, 1.5, generator=generator)
    return module


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    module, x = LAYERS[name]
    check(lively(module), x)


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("linear1", "conv2d_without_batch")])
def test_layers_with_a_dynamic_batch(name):
    module, x = LAYERS[name]
    check(lively(module), x if len(x) > 1 else torch.cat([x, x]), dynamic=True)


# -- pooling -----------------------------------------------------------------------------------------------------------

POOLING = {
    "max1": lambda x: functional.max_pool1d(x.flatten(2), 3, 2, 1),
    "max2": lambda x: functional.max_pool2d(x, (3, 2)),
    "max2_dilated": lambda x: functional.max_pool2d(x, 3, 2, 1, dilation=2),
    "max2_up": lambda x: functional.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "max2_up_far": lambda x: functional.max_pool2d(x, 2, 5, ceil_mode=True),
    "max2_without_batch": lambda x: functional.max_pool2d(x[0], 3, 2),
    "max3": lambda x: functional.max_pool3d(x[None], 2),
    "max_places": lambda x: functional.max_pool2d(x, 2, return_indices=True)[0],
    "average1": lambda x: functional.avg_pool1d(x.flatten(2), 5, 3, 2),
    "average2": lambda x: functional.avg_pool2d(x, 3, 2, 1),
    "average2_without_zeros": lambda x: functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "average2_up": lambda x: functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "average2_up_without_zeros": lambda x: functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "average2_up_unpadded": lambda x: functional.avg_pool2d(x, 4, 3, ceil_mode=True),
    "average3": lambda x: functional.avg_pool3d(x[None], 2),
    "adaptive_one": lambda x: functional.adaptive_avg_pool2d(x, 1),
    "adaptive_equal": lambda x: functional.adaptive_avg_pool2d(x, (3, 4)),
    "adaptive_same": lambda x: functional.adaptive_avg_pool2d(x, (9, 8)),
    "adaptive_none": lambda x: functional.adaptive_avg_pool2d(x, (None, 1)),
    "adaptive_uneven": lambda x: functional.adaptive_avg_pool2d(x, (4, 5)),
    "adaptive1": lambda x: functional.adaptive_avg_pool1d(x.flatten(2), 7),
    "adaptive_max": lambda x: functional.adaptive_max_pool2d(x, 1),
    "adaptive_max_equal": lambda x: functional.adaptive_max_pool2d(x, (3, 4)),
}


@pytest.mark.parametrize("name", POOLING)
def test_pooling(name):
    check(POOLING[name], IMAGE)


@pytest.mark.parametrize("name", [name for name in POOLING if "3" not in name and "without_batch" not in name])
def test_pooling_with_a_dynamic_batch(name):
    check(POOLING[name], IMAGE, dynamic=True)


# -- shapes ------------------------------------------------------------------------------------------------------------

SHAPES = {
    "view": lambda x: x.view(x.shape[0], -1),
    "view_two": lambda x: x.view(x.shape[0], 2, 2, -1),
    "reshape_batch": lambda x: x.reshape(x.shape[0] * 4, 9, 8),
    "reshape_back": lambda x: x.reshape(-1, 8).reshape(x.shape[0], -1, 3),
    "flatten": lambda x: x.flatten(1),
    "flatten_all": lambda x: x.flatten(),
    "flatten_middle": lambda x: x.flatten(-3, -2),
    "unflatten": lambda x: x.unflatten(1, (2, -1)),
    "permute": lambda x: x.permute(0, -1, 1, 2),
    "transpose": lambda x: x.transpose(-1, 1),
    "movedim": lambda x: x.movedim(1, -1),
    "squeeze": lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(),
    "squeeze_dim": lambda x: x.unsqueeze(-2).squeeze(-2).squeeze(1),
    "expand": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "expand_new": lambda x: x.mean((1, 2, 3), keepdim=True).expand(3, -1, 4, 9, 8),
    "expand_as": lambda x: x[:, :, :1].expand_as(x),
    "repeat": lambda x: x.repeat(1, 2, 1, 3),
    "repeat_new": lambda x: x.repeat(2, 1, 1, 1, 2),
    "repeat_batch": lambda x: x[:1].repeat(x.shape[0], 1, 1, 1),
    "unfold": lambda x: x.unfold(2, 4, 2),
    "interleave": lambda x: x.repeat_interleave(3, dim=-2),
    "matrix_transpose": lambda x: x.mT @ x,
    "cat": lambda x: torch.cat([x, x * 2, x[:, :1]], 1),
    "cat_batch": lambda x: torch.cat([x, x], 0),
    "cat_types": lambda x: torch.cat([x.int(), x], -1),
    "stack": lambda x: torch.stack([x, -x], -1),
    "split": lambda x: x.split(3, 1),
    "split_sizes": lambda x: x.split([1, 5, 3], -2),
    "chunk": lambda x: x.chunk(3, 2),
    "chunk_one": lambda x: x.chunk(1, 2),
    "tensor_split": lambda x: x.tensor_split(3, 1),
    "unbind": lambda x: x.unbind(1)[2],
    "select": lambda x: x[:, -1] + x.select(-3, 0),
    "slice": lambda x: x[:, 1:3, ::2, -5:-1],
    "slice_far": lambda x: x[:, :99, 2:],
    "slice_batch": lambda x: x[1:],
    "slice_batch_end": lambda x: x[:-1] + x[-1:],
    "narrow": lambda x: x.narrow(2, 1, 4),
    "roll": lambda x: x.roll((1, -2), (2, 3)),
    "roll_one": lambda x: torch.roll(x, 3, -1),
    "flip": lambda x: x.flip(1, -1),
    "pad": lambda x: functional.pad(x, (1, 2, 0, 3), value=0.5),
    "pad_cut": lambda x: functional.pad(x, (-1, 2)),
    "pad_reflect": lambda x: functional.pad(x, (1, 2, 3, 0), mode="reflect"),
    "pad_replicate": lambda x: functional.pad(x, (1, 2, 3, 0), mode="replicate"),
    "index": lambda x: x[:, torch.tensor([2, 0, 0])],
    "index_last": lambda x: x[..., torch.tensor([[2, -1], [0, 1]])],
    "index_two": lambda x: x[:, torch.tensor([0, 1]), torch.tensor([2, -3])],
    "index_apart": lambda x: x[:, torch.tensor([0, 1]), :, torch.tensor([[2], [3]])],
    "index_select": lambda x: x.index_select(-1, torch.tensor([3, 3, 1])),
    "gather": lambda x: x.gather(-1, torch.arange(8).flip(0).expand(x.shape)),
    "take_along": lambda x: x.gather(1, (x > 0).long()),
    "scatter": lambda x: x.scatter(1, (x[:, :2] > 0).long(), x[:, :2] * 3),
    "scatter_number": lambda x: x.scatter(1, (x[:, :2] > 0).long(), 7.0),
    "index_put": lambda x: x.transpose(0, 1).index_put((torch.tensor([1, 3]),), torch.tensor(5.0).to(x)),
    "tril": lambda x: x.tril(1) + x.triu(-1),
    "zeros": lambda x: torch.cat([x, x.new_zeros(x.shape[0], 1, 9, 8), torch.zeros_like(x), torch.ones_like(x)], 1),
    "full": lambda x: x.new_full((x.shape[0], 4), 3) + torch.full_like(x[:, :, 0, 0], 2.0),
    "arange": lambda x: x[:, :, 0, 0] + torch.arange(x.shape[0], device=x.device)[:, None] * 2,
    "sizes": lambda x: x * x.shape[0] + x.shape[2],
    "written_constant": lambda x: x + _mask(x),
    "filled": lambda x: (x * 2).fill_(3.0) + (x * 2).zero_(),
}  # fmt: skip


def _mask(x: torch.Tensor) -> torch.Tensor:
    """Written to in parts, as Swin's mask is."""
    mask = x.new_zeros((9, 8))
    mask[0:-3, :] = 1
    mask[-3:, 2:4] = torch.tensor(2.0)
    return mask


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    check(SHAPES[name], IMAGE)


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in ("gather", "squeeze", "flatten_all")])
def test_shapes_with_a_dynamic_batch(name):
    check(SHAPES[name], torch.cat([IMAGE, IMAGE[:1]]), dynamic=True)


REDUCTIONS = {
    "mean": lambda x: x.mean((2, 3)),
    "mean_keep": lambda x: x.mean(-1, keepdim=True),
    "mean_all": lambda x: x.mean(),
    "mean_type": lambda x: x.mean(1, dtype=torch.float64),
    "sum": lambda x: x.sum(1),
    "sum_all": lambda x: x.sum(),
    "sum_truth": lambda x: (x > 0).sum(-1),
    "prod": lambda x: x.prod(-1),
    "amax": lambda x: x.amax((1, -1)),
    "amin": lambda x: x.amin(2, keepdim=True),
    "max": lambda x: x.max(),
    "max_dim": lambda x: tuple(x.max(-1)),
    "min_dim": lambda x: tuple(x.min(1, keepdim=True)),
    "max_two": lambda x: torch.max(x, x * 0.5),
    "argmax": lambda x: x.argmax(-1),
    "argmax_all": lambda x: x.argmax(),
    "argmin": lambda x: x.argmin(1, keepdim=True),
    "any": lambda x: (x > 1.9).any(-1),
    "all": lambda x: (x > -1.9).all(),
    "var": lambda x: x.var(-1),
    "var_plain": lambda x: x.var((1, 2), unbiased=False, keepdim=True),
    "std": lambda x: x.std(1, correction=2),
    "var_mean": lambda x: torch.var_mean(x, -1, keepdim=True),
    "logsumexp": lambda x: x.logsumexp(-1),
    "channels": lambda x: functional.batch_norm(x, None, None, x[0, :, 0, 0], x[0, :, 1, 0], training=True),
    "norm": lambda x: x.norm(dim=1),
    "norm_one": lambda x: torch.linalg.vector_norm(x, 1, dim=(1, 2), keepdim=True),
    "norm_most": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=-1),
    "normalize": lambda x: functional.normalize(x, dim=-1),
    "cumsum": lambda x: x.cumsum(-2),
    "cumsum_truth": lambda x: (x > 0).cumsum(1),
    "topk": lambda x: torch.topk(x, 3, -1),
    "topk_smallest": lambda x: torch.topk(x, 2, 1, largest=False),
    "sort": lambda x: torch.sort(x, -1, descending=True),
    "argsort": lambda x: x.argsort(1),
    "one_hot": lambda x: functional.one_hot(x.argmax(-1), 8),
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name):
    check(REDUCTIONS[name], IMAGE, dynamic=name not in ("argmax_all",))


PRODUCTS = {
    "matmul": lambda x, y: x @ y,
    "matmul_vector": lambda x, y: x @ y[0, :, 0],
    "bmm": lambda x, y: torch.bmm(x, y),
    "mm": lambda x, y: torch.mm(x[0], y[0]),
    "mv": lambda x, y: torch.mv(x[0], y[0, :, 0]),
    "addmm": lambda x, y: torch.addmm(y[0, 0], x[0], y[0], beta=0.5, alpha=2),
    "baddbmm": lambda x, y: torch.baddbmm(x @ y, x, y, beta=0.5, alpha=2),
    "baddbmm_without": lambda x, y: torch.baddbmm(x @ y, x, y, beta=0),
    "einsum": lambda x, y: torch.einsum("bij, bjk -> bik", x, y),
    "einsum_heads": lambda x, y: torch.einsum("bic,bcd->ibd", x, y),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    check(PRODUCTS[name], CUBE, values(2, 4, 5, seed=2))


MODES = ("nearest", "nearest-exact", "bilinear", "bicubic")
RESAMPLING = [
    *({"mode": mode, "scale_factor": factor} for mode in MODES for factor in (2, 1.5, 0.6)),
    *({"mode": mode, "size": (5, 13)} for mode in MODES),
    *({"mode": mode, "size": (5, 13), "align_corners": True} for mode in ("bilinear", "bicubic")),
    {"mode": "bilinear", "scale_factor": (1.5, 2.0), "align_corners": True},
]  # fmt: skip


@pytest.mark.parametrize("settings", RESAMPLING, ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_resampling(settings, dynamic):
    check(lambda x: functional.interpolate(x, **settings), IMAGE, dynamic=dynamic)


def test_resampling_of_one_and_three_axes():
    check(lambda x: functional.interpolate(x, scale_factor=2, mode="linear"), values(2, 3, 7))
    check(lambda x: functional.interpolate(x, size=(4, 3, 6), mode="trilinear"), values(1, 2, 2, 3, 4))
    check(lambda x: functional.interpolate(x, scale_factor=2, mode="nearest"), values(2, 3, 7))


ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("dynamic", [False, True])
def test_attention(name, dynamic):
    check(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **ATTENTION[name]),
        values(2, 3, 5, 4), values(2, 3, 5, 4, seed=1), values(2, 3, 5, 6, seed=2), dynamic=dynamic,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["float", "bool", "empty_row"])
def test_attention_with_a_mask(kind):
    mask = values(5, 7, seed=4)
    if kind != "float":
        mask = mask > 0
        mask[:, 0] = True
        mask[0] = kind == "bool"
    check(
        lambda q, k, v, m: functional.scaled_dot_product_attention(q, k, v, attn_mask=m),
        values(2, 3, 5, 4), values(2, 3, 7, 4, seed=1), values(2, 3, 7, 4, seed=2), mask,
    )  # fmt: skip


def test_attention_whose_heads_share_keys():
    check(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        values(2, 6, 5, 4), values(2, 2, 5, 4, seed=1), values(2, 2, 5, 4, seed=2), dynamic=True,
    )  # fmt: skip


def test_attention_over_a_dynamic_number_of_positions():
    check(lambda q: functional.scaled_dot_product_attention(q, q, q, is_causal=True), values(5, 4), dynamic=True)


RECURRENT = [
    lambda **settings: nn.LSTM(3, 4, **settings),
    lambda **settings: nn.GRU(3, 4, **settings),
    lambda **settings: nn.RNN(3, 4, **settings),
    lambda **settings: nn.RNN(3, 4, nonlinearity="relu", **settings),
]


@pytest.mark.parametrize("kind", range(len(RECURRENT)))
@pytest.mark.parametrize(
    "settings",
    [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}, {"bias": False, "num_layers": 2}],
    ids=str,
)
def test_recurrent_layers(kind, settings):
    check(lively(RECURRENT[kind](**settings)), values(5, 2, 3))
