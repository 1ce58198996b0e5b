"""Products with a parameter of any form are layers; the experts of a mixture, too."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto
from torch import nn
from torch.nn import functional

import amct.pytorch

if not hasattr(getattr(torch.ops, "transformers", None), "grouped_mm_fallback"):

    @torch.library.custom_op(
        "transformers::grouped_mm_fallback",
        mutates_args=(),
        schema="(Tensor input, Tensor weight, Tensor offs) -> Tensor",
    )
    def _grouped_mm_fallback(x, weight, offs):
        starts = [0, *offs.tolist()[:-1]]
        return torch.cat([x[start:end] @ each for start, end, each in zip(starts, offs.tolist(), weight, strict=True)])

    @_grouped_mm_fallback.register_fake
    def _(x, weight, _):
        return x.new_empty(x.shape[0], weight.shape[2])


class Between(nn.Module):
    """A product with the parameter ``p``, or a function of it, between two linear layers."""

    def __init__(self, shape, function, outputs):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.p = nn.Parameter(torch.randn(shape) * 0.3)
        self.last = nn.Linear(outputs, 8)
        self.function = function

    def forward(self, x):
        return self.last(torch.relu(self.function(self.first(x), self.p)))


def _heads(x):
    return x.unflatten(-1, (4, 4))


def _experts(x, weight):
    """Tokens to one of three experts each, as transformers calls them."""
    rows = x.flatten(0, 1)
    chosen = rows[:, :3].argmax(-1)
    order = torch.argsort(chosen, stable=True)
    ends = (chosen.unsqueeze(1) <= torch.arange(3)).sum(0)
    made = torch.ops.transformers.grouped_mm_fallback(rows[order], weight.transpose(-2, -1), ends.to(torch.int32))
    return made[torch.argsort(order)].unflatten(0, x.shape[:2])


def run_onnx(file, x):
    return onnxruntime.InferenceSession(file).run(None, {"x": x.numpy()})[0]


CASES = {
    "einsum": ((16, 24), lambda x, p: torch.einsum("bsk,kn->bsn", x, p), 24, ["p"]),
    "heads": ((16, 4, 6), lambda x, p: torch.einsum("bsk,khd->bshd", x, p).flatten(2), 24, ["p"]),
    "weights for each head": (
        (4, 4, 6),
        lambda x, p: torch.einsum("bshd,hdo->bsho", _heads(x), p).flatten(2),
        24,
        ["p"],
    ),
    "weight on the left": ((20, 16), lambda x, p: (p @ x.transpose(1, 2)).transpose(1, 2), 20, ["p"]),
    "bmm": ((2, 16, 12), torch.bmm, 12, ["p"]),
    "baddbmm": ((2, 16, 12), lambda x, p: torch.baddbmm(x[..., :12], x, p), 12, ["p"]),
    "addmm": ((16, 12), lambda x, p: torch.stack([torch.addmm(x[0, :, :12], each, p) for each in x]), 12, ["p"]),
    "ensemble": ((3, 16, 6), lambda x, p: (x.unsqueeze(1) @ p).mean(1), 6, ["p"]),
    "slices": (
        (3, 12, 16),
        lambda x, p: sum(functional.linear(x, p[i]) for i in range(3)),
        12,
        ["p[0]", "p[1]", "p[2]"],
    ),
    "experts": ((3, 12, 16), _experts, 12, ["p"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_product_with_a_parameter_is_a_layer_with_integer_weights(case, tmp_path):
    torch.manual_seed(0)
    shape, function, outputs, layers = CASES[case]
    model = Between(shape, function, outputs).eval()
    data = [torch.randn(2, 7, 16) for _ in range(3)]
    quantized = amct.pytorch.quantize(model, data)
    assert set(quantized.layers) == {"first", *layers, "last"}
    assert not quantized.skipped

    quantized.save(tmp_path / "net", formats=["qdq", "fake_quant"], check=False)
    with torch.no_grad():
        simulated, expected = quantized(data[0]).numpy(), model(data[0]).numpy()
    np.testing.assert_allclose(run_onnx(tmp_path / "net_fake_quant_model.onnx", data[0]), simulated, atol=1e-5)
    written = run_onnx(tmp_path / "net_qdq_model.onnx", data[0])
    assert np.square(written - expected).mean() < 0.002 * np.square(expected).mean()
    stored = onnx.load(tmp_path / "net_qdq_model.onnx").graph.initializer
    floats = [tensor for tensor in stored if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) > 1]
    assert not floats
    assert not json.loads((tmp_path / "net_quant.json").read_text())["skipped"]


@pytest.mark.parametrize("case", ["heads", "weights for each head", "baddbmm", "experts"])
def test_such_a_layer_is_trained_and_the_file_is_the_trained_model(case, tmp_path):
    torch.manual_seed(0)
    shape, function, outputs, _ = CASES[case]
    data = [torch.randn(2, 7, 16) for _ in range(3)]
    model = amct.pytorch.prepare_qat(Between(shape, function, outputs), data)
    before = model.p.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for x in data:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert not torch.equal(model.p, before)
    model.eval()
    model.save(tmp_path / "net", formats=["qdq"], placement="exact", target="exact8")
    with torch.no_grad():
        expected = model(data[0]).numpy()
    written = run_onnx(tmp_path / "net_qdq_model.onnx", data[0])
    assert np.square(written - expected).mean() < 1e-4 * np.square(expected).mean()
