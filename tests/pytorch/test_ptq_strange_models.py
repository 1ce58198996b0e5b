"""Models that do something unusual: each is quantized, or the message says what to do about it."""

from __future__ import annotations

import dataclasses
import logging
import warnings

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.torch_version import TorchVersion

import amct.pytorch
from amct.errors import ExportError, ModelError


def batches(*shape, count=3):
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def with_forward(forward, **children):
    """A module with children and a forward; the function gets the module first."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            for name, child in children.items():
                setattr(self, name, child)

    Model.forward = forward
    torch.manual_seed(0)
    return Model().eval()


def saved(quantized, folder, formats=("qdq",)):
    quantized.save(folder / "net", formats)
    return onnxruntime.InferenceSession(folder / "net_qdq_model.onnx")


def is_near(given, wanted):
    return np.square(given - wanted).sum() < 2e-3 * np.square(wanted).sum()


# ------------------------------------------------------------------ quantized like any other model


@pytest.mark.parametrize("form", ["method", "lambda", "closure"])
@pytest.mark.parametrize("grad", [True, False])
def test_features_that_a_hook_keeps_on_the_model(form, grad, tmp_path):
    def forward(self, x):
        y = self.b(functional.relu(self.a(x)))
        return self.c(torch.cat([self.features["a"], y], 1))

    def keep(self, *call):
        self.features["a"] = call[-1]

    convs = {"a": nn.Conv2d(3, 4, 3), "b": nn.Conv2d(4, 8, 1), "c": nn.Conv2d(12, 2, 1)}
    model = with_forward(forward, features={}, **convs)
    type(model).keep, kept = keep, model.features
    hooks = {
        "method": model.keep,
        "lambda": lambda *call: model.keep(*call),
        "closure": lambda *call: kept.update(a=call[-1]),
    }
    model.a.register_forward_hook(hooks[form])
    with torch.set_grad_enabled(grad):
        model(*batches(1, 3, 8, 8, count=1))
    features, data = model.features["a"], batches(1, 3, 8, 8)
    quantized = amct.pytorch.quantize(model, data)
    assert model.features["a"] is features
    session = saved(quantized, tmp_path)
    simulated = quantized.model(data[0]).detach().numpy()
    assert model.features["a"] is features
    assert is_near(simulated, model(data[0]).detach().numpy())
    assert is_near(session.run(None, {session.get_inputs()[0].name: data[0].numpy()})[0], simulated)


def test_a_branch_that_no_output_depends_on(tmp_path):
    """The auxiliary head of UperNet: its batch norm is folded, but the file has neither."""

    def forward(self, x):
        self.norm(self.aux(x))
        return self.conv(x)

    model = with_forward(forward, conv=nn.Conv2d(3, 4, 3), aux=nn.Conv2d(3, 4, 1), norm=nn.BatchNorm2d(4))
    data = batches(2, 3, 8, 8)
    quantized = amct.pytorch.quantize(model, data)
    assert quantized.layers == ("conv",)
    given = saved(quantized, tmp_path).run(None, {"x": data[0].numpy()})[0]
    assert is_near(given, model(data[0]).detach().numpy())


def test_a_compiled_module_inside(tmp_path):
    inner = nn.Linear(6, 8)
    model = nn.Sequential(torch.compile(inner, backend=_no_compiler), nn.ReLU(), nn.Linear(8, 4)).eval()
    quantized = amct.pytorch.quantize(model, batches(3, 6))
    assert len(quantized.layers) == 2
    saved(quantized, tmp_path)
    assert quantized(batches(3, 6)[0]).shape == (3, 4)


def _no_compiler(*_):
    raise AssertionError("something is compiled")


def test_a_layer_inside_vmap(tmp_path):
    def forward(self, x):
        return self.head(torch.vmap(lambda row: self.body(row).relu())(x))

    model = with_forward(forward, body=nn.Linear(6, 8), head=nn.Linear(8, 4))
    data = batches(3, 5, 6)
    quantized = amct.pytorch.quantize(model, data)
    if TorchVersion(torch.__version__) >= "2.9":
        assert quantized.layers == ("body", "head")
    else:  # these record what vmap makes of a layer
        assert quantized.layers == ("head",)
        assert [str(skip) for skip in quantized.skipped] == ['"body": its forward calls linear 0 times, not once']
    wanted = model(data[0]).detach().numpy()
    assert is_near(quantized(data[0]).numpy(), wanted)
    assert is_near(saved(quantized, tmp_path).run(None, {"x": data[0].numpy()})[0], wanted)
    assert all(each.sqnr > 30 for each in quantized.compare(data))


def test_the_median_and_the_kth_value(tmp_path):
    def forward(self, x):
        y = self.body(x)
        value, place = y.kthvalue(2, dim=1, keepdim=True)
        return y, y.median(1).values, value, place

    model = with_forward(forward, body=nn.Linear(6, 6))
    session = saved(amct.pytorch.quantize(model, batches(2, 5, 6)), tmp_path)
    y, median, value, place = session.run(None, {"x": batches(2, 5, 6)[0].numpy()})
    np.testing.assert_array_equal(median, np.sort(y, axis=1)[:, 2])
    np.testing.assert_array_equal(value, np.sort(y, axis=1)[:, 1:2])
    np.testing.assert_array_equal(np.take_along_axis(y, place, 1), value)


@pytest.mark.parametrize("opset", [17, 18])
def test_zeros_before_a_maximum(opset, tmp_path):
    """The stem of BiT; onnxruntime would merge the zeros into the pooling, which pads with minus infinity."""
    layers = [nn.Conv2d(3, 4, 3), nn.ConstantPad2d(1, 0.0), nn.MaxPool2d(3, 2), nn.Conv2d(4, 2, 1)]
    model = nn.Sequential(*layers).eval()
    model[0].bias.data -= 9
    data = batches(2, 3, 9, 9)
    quantized = amct.pytorch.quantize(model, data)
    quantized.save(tmp_path / "net", ["qdq"], opset=opset)
    wanted = model(data[0]).detach().numpy()
    float_model = quantized.prepared.float_model(opset).SerializeToString()
    for file in (float_model, tmp_path / "net_qdq_model.onnx"):
        session = onnxruntime.InferenceSession(file)
        given = session.run(None, {session.get_inputs()[0].name: data[0].numpy()})[0]
        assert is_near(given, wanted)


def test_zeros_before_a_maximum_of_half_precision(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ZeroPad2d(1), nn.MaxPool2d(3, 2), nn.Conv2d(4, 2, 1)).eval().half()
    data = [batch.half() for batch in batches(2, 3, 9, 9)]
    quantized = amct.pytorch.quantize(model, data)
    quantized.save(tmp_path / "net", ["qdq"])  # a file that cannot be loaded would be an error
    session = onnxruntime.InferenceSession(tmp_path / "net_qdq_model.onnx")
    given = session.run(None, {session.get_inputs()[0].name: data[0].numpy()})[0]
    assert given.dtype == np.float16
    assert is_near(given, model(data[0]).detach().numpy())


@dataclasses.dataclass(frozen=True)
class Found:
    scores: torch.Tensor
    boxes: list[torch.Tensor]
    count: int = 2


def test_a_data_class_as_output_is_compared_and_reported(tmp_path, caplog):
    def forward(self, x):
        return Found(self.scores(x), [self.boxes(x), -x])

    model = with_forward(forward, scores=nn.Linear(6, 3), boxes=nn.Linear(6, 4))
    quantized = amct.pytorch.quantize(model, batches(3, 6))
    files = quantized.save(tmp_path / "net", ["qdq"])
    seen = []

    def metric(output, _):
        seen.append(output)
        return float(output.boxes[0].mean())

    quantized.report(tmp_path / "report.html", batches(3, 6, count=1), metric, files=files)
    exact, rounded = seen
    assert isinstance(rounded, Found)
    assert is_near(rounded.boxes[0].numpy(), exact.boxes[0].numpy())
    assert "outputs and metric of the simulation" not in caplog.text


def test_shapes_that_depend_on_values_are_no_obstacle_to_a_report(tmp_path, caplog):
    def forward(self, x):
        y = self.body(x)
        return self.head(y[y[:, 0] > 0])

    model = with_forward(forward, body=nn.Linear(6, 6), head=nn.Linear(6, 2))
    data = batches(400, 6, count=1)
    model.body.bias.data[0] -= model.body(data[0])[:, 0].median().item()  # some rows are near the limit
    quantized = amct.pytorch.quantize(model, data)
    quantized.report(tmp_path / "report.html")
    assert 'the output of layer "head" has different shapes' in caplog.text


# ------------------------------------------------------------------ reasons


def test_a_layer_that_reads_no_input_has_this_as_its_reason():
    def forward(self, x):
        return self.head(x) + self.table(self.places)

    model = with_forward(forward, head=nn.Linear(6, 4), table=nn.Linear(2, 4))
    model.register_buffer("places", torch.rand(3, 2))
    skip, *_ = amct.pytorch.quantize(model, batches(3, 6)).skipped
    assert skip.layer == "table"
    assert "reads nothing that depends on the model's input" in skip.reason


def test_derived_embeddings_and_norms_are_reported():
    class Scaled(nn.Embedding):
        def forward(self, words):
            return 2 * super().forward(words)

    class Norm(nn.LayerNorm):
        pass

    class Body(nn.Sequential):
        def __init__(self):
            super().__init__(Scaled(9, 6), Norm(6), nn.Linear(6, 4))
            self.shift = nn.Parameter(torch.ones(4))

    skips = amct.pytorch.quantize(Body().eval(), [torch.tensor([[1, 2, 3]])]).skipped
    assert [str(skip) for skip in skips] == ['"0": Embedding is not quantizable', '"1": LayerNorm is not quantizable']


# ------------------------------------------------------------------ warnings


class Random(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.randn_like(x).sum()


class Counting(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        return super().forward(x) + self.seen[:2].add_(1).sum()


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Random, "draws random numbers (randn_like at"), (Counting, 'writes to the buffer "0.seen" at')],
)
def test_what_a_file_cannot_repeat(kind, words, caplog):
    amct.pytorch.quantize(nn.Sequential(kind(6, 4)).eval(), batches(3, 6))
    assert words in caplog.text
    assert "test_ptq_strange_models.py:" in caplog.text


def test_dropout_in_eval_mode_draws_nothing(caplog):
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)).eval()
    amct.pytorch.quantize(model, batches(3, 6))
    assert "random" not in caplog.text


def test_a_program_that_is_not_the_model(tmp_path, caplog):
    """Libraries ask whether they are captured, and compute something else then."""

    def forward(self, x):
        return self.head(self.body(x).relu() if torch.compiler.is_compiling() else self.body(x).abs())

    model = with_forward(forward, body=nn.Linear(6, 8), head=nn.Linear(8, 4))
    amct.pytorch.quantize(model, batches(3, 6)).save(tmp_path / "net", ["qdq"])
    (said,) = [record.getMessage() for record in caplog.records if "worse than the simulation" in record.getMessage()]
    assert "what was exported does not compute what the model computes" in said
    assert "while it is captured" in said


def test_a_float_model_that_onnxruntime_cannot_run_is_warned_of(tmp_path, caplog):
    """The example fits the model and not the file: an index out of range wraps in neither."""

    def forward(self, x, rows):
        return self.body(x)[rows % 3]

    model = with_forward(forward, body=nn.Linear(6, 4))
    quantized = amct.pytorch.quantize(model, [(batches(3, 6)[0], torch.tensor([0, 2]))])
    onnx = quantized.prepared.default_onnx.model
    gather = next(node for node in onnx.graph.node if node.op_type == "Gather")
    gather.input[1] = next(value.name for value in onnx.graph.input if value.name == "rows")
    quantized._examples = [((batches(3, 6)[0], torch.tensor([7, 8])), {})]
    with caplog.at_level(logging.WARNING, "amct"):
        quantized.save(tmp_path / "net", ["qdq"])
    assert "net_qdq_model.onnx may be unusable: the float model cannot be run" in caplog.text


# ------------------------------------------------------------------ errors that name the cause


def packed(self, x):
    sequence = nn.utils.rnn.pack_padded_sequence(x, [4, 2], batch_first=True)
    return self.head(self.recurrent(sequence)[1])


def test_a_packed_sequence(tmp_path):
    model = with_forward(packed, recurrent=nn.GRU(6, 5, batch_first=True), head=nn.Linear(5, 2))
    quantized = amct.pytorch.quantize(model, batches(2, 4, 6))
    assert quantized.layers == ("head",)
    with pytest.raises(ExportError, match=r'"recurrent" is given a PackedSequence.*give it the padded tensor'):
        quantized.save(tmp_path / "net")


class Eigenvalues(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvalsh(x)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.cfloat))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(self.body(x)) * self.filter, n=8)


class Sparse(nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.register_buffer("links", torch.eye(2).to_sparse(layout=layout))

    def forward(self, x):
        return torch.relu(self.links @ self.body(x))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says that its sparse tensors may change
    SPARSE = {layout: Sparse(layout).eval() for layout in (torch.sparse_coo, torch.sparse_csr)}

UNEXPORTABLE = {
    "a projection": (
        with_forward(lambda self, x: self.body(self.recurrent(x)[0]), recurrent=nn.LSTM(6, 5, proj_size=3),
                     body=nn.Linear(3, 2)), (4, 2, 6), "proj_size cannot be exported.*a Linear behind",
    ),
    "a complex parameter": (Complex().eval(), (2, 8), '"filter" is complex, and ONNX files have real tensors only'),
    "a sparse buffer": (SPARSE[torch.sparse_coo], (2, 8), r'"links" is sparse \(sparse_coo\), and ONNX files'),
    "a compressed buffer": (SPARSE[torch.sparse_csr], (2, 8), r'"links" is sparse \(sparse_csr\), and ONNX files'),
    "an operator without a form": (
        nn.Sequential(nn.Linear(6, 6), Eigenvalues()).eval(),
        (6, 6), r"the operator aten\.\w+eigh.*test_ptq_strange_models.py:\d+\) has no form in ONNX",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("model", "shape", "words"), UNEXPORTABLE.values(), ids=UNEXPORTABLE)
def test_what_has_no_form_in_a_file(model, shape, words, tmp_path):
    quantized = amct.pytorch.quantize(model, batches(*shape))
    with pytest.raises(ExportError, match=words):
        quantized.save(tmp_path / "net")


def test_an_argument_that_only_the_capture_needs(caplog):
    def forward(self, x, mask=None):
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones(x.shape[:1])
        return self.body(x) * mask[:, None]

    amct.pytorch.quantize(with_forward(forward, body=nn.Linear(6, 4)), batches(3, 6))
    assert "the forward needs an argument that it was not given" in caplog.text


def test_a_program_of_torch_export_is_refused():
    program = torch.export.export(nn.Sequential(nn.Linear(6, 4)), (torch.zeros(2, 6),))
    with pytest.raises(ModelError, match=r"a program of torch\.export.*give the nn.Module"):
        amct.pytorch.quantize(program.module(), batches(2, 6))


def test_a_quantized_module_is_refused():
    model = nn.Sequential(nn.Linear(6, 4), functional_dropout())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its own quantization is deprecated
        model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    with pytest.raises(ModelError, match=r'"0" .*is already quantized; start from the float model'):
        amct.pytorch.quantize(model, batches(2, 6))


def functional_dropout():
    return with_forward(lambda _, x: functional.dropout(x, training=False))
