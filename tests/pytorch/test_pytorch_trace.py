from __future__ import annotations

import copy
import inspect
import json
import logging
import threading

import pytest
import torch
import torch._dynamo.eval_frame
from pytorch_nets import CASES, Attention, Case, DataDependent, ResNet, Shared, case, lively
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from torch_release import SINCE_2_8

from amct.errors import ArgumentTypeError, ExportError, ModelError
from amct.pytorch.capture.program import uncompiled
from amct.pytorch.capture.trace import trace
from amct.pytorch.inputs import IoOptions
from amct.pytorch.user_model import AMCT_OPERATORS

IMAGE = (2, 3, 6, 6)


class Around(nn.Module):
    """One module in a model, called as ``how`` does it."""

    def __init__(self, layer: nn.Module, how=None) -> None:
        super().__init__()
        self.layer = layer
        self.how = how

    def forward(self, x):
        return self.how(self, x) if self.how else self.layer(x)


def reason(model: nn.Module, data, layer: str = "layer") -> str:
    traced = trace(model, data)
    assert layer not in traced.layers
    return next(skip.reason for skip in traced.skips if skip.layer == layer)


# -- layers ---------------------------------------------------------------------------------------------


GOLDEN = {
    "mix": "small_mix_default",
    "conv1d3d": "small_conv1d3d_default",
    "shared": "small_shared_default",
    "attention": "small_matmul_default",
    "lstm": "small_lstm_default",
    "gru": "small_gru_default",
    "rnn": "small_rnn_tanh_default",
    "lstm_bidirectional": "small_lstm_bi2_default",
    "gru_state_batch_first": "small_gru_bf_hx",
    "resnet20": "r20_default",
}


@pytest.mark.parametrize(("name", "folder"), GOLDEN.items())
def test_the_same_layers_as_the_reference(name: str, folder: str, golden):
    config = json.loads((golden / "amct" / folder / "config.json").read_text())
    expected = {layer for layer, settings in config.items() if isinstance(settings, dict)}
    assert set(trace(case(name).model(), case(name).inputs()).layers) == expected


def test_layers_come_in_execution_order():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 4)
            self.first = nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.first(x))

    assert list(trace(Backwards(), torch.randn(2, 4)).layers) == ["first", "last"]


def test_facts_of_a_convolution():
    layer = nn.Conv2d(4, 8, (3, 1), stride=2, padding=(1, 0), groups=2, bias=False)
    facts = trace(Around(layer), torch.randn(2, 4, 6, 6)).layers["layer"]
    assert (facts.type, facts.dtype) == ("Conv2d", "float32")
    assert (facts.in_channels, facts.out_channels, facts.groups, facts.bias) == (4, 8, 2, False)
    assert facts.weight_shape == (8, 2, 3, 1)
    assert facts.input_shapes == ((2, 4, 6, 6),)
    assert facts.attributes["kernel_size"] == (3, 1)
    assert facts.attributes["padding_mode"] == "zeros"


@pytest.mark.parametrize(
    ("item", "kind", "channels"),
    [
        ("lstm_state", "LSTM", (8, 12)),
        ("gru", "GRU", (8, 12)),
    ],
)
def test_facts_of_a_recurrent_layer(item, kind, channels):
    facts = trace(case(item).model(), case(item).inputs()).layers["rnn"]
    assert facts.type == kind
    assert (facts.in_channels, facts.out_channels) == channels
    assert facts.attributes["hidden_size"] == 12
    assert facts.bias


def test_facts_of_pooling():
    facts = trace(Around(nn.AvgPool2d(2)), torch.randn(IMAGE)).layers["layer"]
    assert (facts.type, facts.in_channels, facts.weight_shape, facts.bias) == ("AvgPool2d", None, None, False)


def test_a_subclass_has_the_type_of_its_base():
    traced = trace(case("mobile").model(), case("mobile").inputs())
    assert traced.layers["stem.0"].type == "Conv2d"
    assert type(traced.model.get_submodule("stem.0")).__name__ == "SameConv"
    assert traced.module_types["stem.0"] == "Conv2d"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype):
    traced = trace(case("mix").model().to(dtype), case("mix").inputs().to(dtype))
    assert len(traced.layers) == 9
    assert {facts.dtype for name, facts in traced.layers.items() if name != "pool"} == {str(dtype)[6:]}


def test_config_layers():
    layers = trace(case("mix").model(), case("mix").inputs()).config_layers()
    assert layers.names[:3] == ("conv", "bn", "grp")
    assert layers.find("fcnb").has_bias is False
    assert layers.find("grp").can_pack_int4 is False
    assert layers.find("conv").can_pack_int4 is True
    assert "padding_mode" in layers.find("circ").refusal
    assert layers.find("bn").type == "BatchNorm2d"


# -- reasons --------------------------------------------------------------------------------------------


class DoubledInput(nn.Linear):
    def forward(self, input):  # noqa: A002
        return super().forward(2 * input)


class TwoProducts(nn.Linear):
    def forward(self, input):  # noqa: A002
        return super().forward(input) + functional.linear(input, self.weight)


class ScaledWeight(nn.Linear):
    def forward(self, input):  # noqa: A002
        return functional.linear(input, 2 * self.weight, self.bias)


class OtherWork(nn.Conv2d):
    def forward(self, input):  # noqa: A002
        return input


def packed(self, x):
    return self.layer(pack_padded_sequence(x, torch.tensor([5, 4])))[0].data


SEQUENCE = (5, 2, 8)


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (Around(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")), IMAGE, 'padding_mode is "reflect"'),
        (Around(nn.Conv3d(1, 1, 2, dilation=(2, 1, 1))), (1, 1, 4, 4, 4), "the first must be 1"),
        (Around(nn.AvgPool2d(2, divisor_override=3)), IMAGE, "divisor_override is 3"),
        (Around(nn.Linear(6, 6), lambda self, x: self.layer(self.layer(x))), (2, 6), "called 2 times"),
        (Around(nn.Linear(6, 6), lambda _, x: x * 2), (2, 6), "not called in forward"),
        (
            Around(nn.Linear(6, 6), lambda s, x: functional.linear(x, s.layer.weight)),
            (2, 6),
            "a functional call may use",
        ),
        (Around(nn.Conv2d(3, 4, 3)), (3, 6, 6), "3 dimensions, not 4; an input without a batch"),
        (Around(nn.LSTM(8, 4), lambda self, x: self.layer(x)[0]), (5, 8), "2 dimensions, not 3"),
        (Around(nn.LSTM(8, 4, num_layers=2), lambda self, x: self.layer(x)[0]), SEQUENCE, "2 layers"),
        (Around(nn.GRU(8, 4, bidirectional=True), lambda self, x: self.layer(x)[0]), SEQUENCE, "bidirectional"),
        (Around(nn.LSTM(8, 4, proj_size=2), lambda self, x: self.layer(x)[0]), SEQUENCE, "proj_size is 2"),
        (Around(nn.ConvTranspose3d(1, 1, 2)), (1, 1, 4, 4, 4), "ConvTranspose3d is not quantizable"),
        (Around(nn.LayerNorm(6)), (2, 6), "LayerNorm is not quantizable"),
        (Around(ScaledWeight(6, 6)), (2, 6), "computes the weight it uses"),
        (Around(DoubledInput(6, 6)), (2, 6), "changes the input before linear"),
        (Around(TwoProducts(6, 6)), (2, 6), "calls linear 2 times"),
        (Around(OtherWork(3, 3, 1)), IMAGE, "not called in forward"),
        (Around(nn.LSTM(8, 4), packed), SEQUENCE, "PackedSequence"),
    ],
    ids=lambda value: None if isinstance(value, tuple) else str(value).replace("\n", "")[:40],
)
def test_reasons(model, shape, expected):
    assert expected in reason(model, torch.randn(shape))


def test_dropout_in_a_recurrent_layer():
    with pytest.warns(UserWarning, match="dropout option"):  # torch's own: it has no effect in a single layer
        layer = nn.LSTM(8, 4, dropout=0.5)
    assert "dropout is 0.5" in reason(Around(layer, lambda self, x: self.layer(x)[0]), torch.randn(SEQUENCE))


def test_a_model_that_is_one_layer():
    assert "put it into a module" in reason(nn.Linear(4, 4), torch.randn(2, 4), "")


def test_shared_weights_name_the_partner():
    traced = trace(Shared(), torch.randn(2, 4, 8, 8))
    reasons = {skip.layer: skip.reason for skip in traced.skips}
    assert 'shares its weight with "t2"' in reasons["t1"]
    assert 'shares its weight with "t1"' in reasons["t2"]


def test_an_embedding_may_share_the_weight_of_the_last_layer():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 6)
            self.head = nn.Linear(6, 10, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids):
            return self.head(self.table(ids))

    assert list(trace(Language(), torch.tensor([[1, 2]])).layers) == ["head"]


def test_functional_calls_are_told_with_their_line():
    traced = trace(case("functional").model(), case("functional").inputs())
    assert list(traced.layers) == ["layer"]
    convolution, product = traced.skips
    assert convolution.layer == "conv2d"
    assert "functional call of conv2d" in convolution.reason
    assert "with kernel" in convolution.reason
    assert "pytorch_nets.py:" in convolution.reason
    assert product.layer == "matmul"
    assert "with matrix" in product.reason


def test_torchs_own_attention_is_told_by_its_name():
    traced = trace(case("transformer").model(), case("transformer").inputs())
    reasons = {skip.layer: skip.reason for skip in traced.skips}
    assert list(traced.layers) == ["encoder.linear1", "encoder.linear2", "head"]
    assert reasons["encoder.self_attn"] == "MultiheadAttention is not quantizable"
    assert "not called in forward" in reasons["encoder.self_attn.out_proj"]


# -- topology -------------------------------------------------------------------------------------------


def test_topology_of_a_residual_block():
    graph = trace(ResNet(1), torch.randn(1, 3, 32, 32)).graph
    assert graph.inputs == ("x",)
    assert graph.sole_consumer(graph["conv1"]) is graph["bn1"]
    block = graph["layer1.0.bn2"]
    (add,) = graph.successors(block)
    assert add.op == "add"
    assert {node.op for node in graph.predecessors(add)} == {"BatchNorm2d", "relu"}
    assert graph.predecessors(graph["linear"])[0].op == "view"
    assert graph.outputs == graph["linear"].outputs


@pytest.mark.parametrize("item", CASES, ids=lambda item: item.name)
def test_every_layer_is_a_node_of_the_topology(item: Case):
    traced = trace(item.model(), item.inputs())
    assert traced.failure is None
    for name, facts in traced.layers.items():
        assert traced.graph[name].op == facts.type


def test_a_module_called_twice_has_two_nodes():
    graph = trace(Shared(), torch.randn(2, 4, 8, 8)).graph
    assert graph["a"].attributes["calls"] == graph["a@1"].attributes["calls"] == 2


def test_reading_sizes_is_no_use_of_a_tensor():
    model = Around(nn.Conv2d(3, 4, 3), lambda self, x: (y := self.layer(x)).reshape(y.shape[0], y.shape[1], -1))
    graph = trace(model, torch.randn(IMAGE), io=IoOptions(dynamic_axes={"x": {0: "batch"}})).graph
    assert graph.sole_consumer(graph["layer"]).op == "reshape"


def test_a_region_under_autocast_is_read_too():
    def in_full_precision(self, x):
        with torch.autocast("cpu", enabled=False):
            x = torch.relu(self.layer(x))
        return x + 1

    traced = trace(Around(nn.Linear(6, 6), in_full_precision), torch.randn(2, 6))
    assert list(traced.layers) == ["layer"]
    relu = traced.graph.sole_consumer(traced.graph["layer"])
    assert relu.op == "relu"
    assert traced.graph.sole_consumer(relu).op == "add"


def test_no_grad_in_the_forward():
    def without_gradient(self, x):
        with torch.no_grad():
            return self.layer(x)

    assert list(trace(Around(nn.Linear(6, 6), without_gradient), torch.randn(2, 6)).layers) == ["layer"]


# -- the user's things stay as they are -----------------------------------------------------------------


@pytest.mark.parametrize("net", [lambda: lively(ResNet(1)), DataDependent], ids=["captured", "watched"])
def test_the_model_stays_as_it_is(net):
    model = net().train()
    calls = []
    model.conv1.register_forward_hook(lambda *_: calls.append(1)) if hasattr(model, "conv1") else None
    hooks = {name: dict(module._forward_hooks) for name, module in model.named_modules()}
    before = copy.deepcopy(model.state_dict())
    identities = {name: id(parameter) for name, parameter in model.named_parameters()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    trace(model, torch.randn(IMAGE[0], 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert {name: dict(module._forward_hooks) for name, module in model.named_modules()} == hooks
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == identities
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_example_input_stays_as_it_is():
    data = torch.randn(1, 3, 32, 32)
    before = data.clone(), dict(vars(data))
    trace(ResNet(1), data, io=IoOptions(dynamic_axes={"x": {0: "batch"}}))
    assert torch.equal(data, before[0])
    assert vars(data) == before[1]


def test_a_counter_in_the_forward_does_not_count():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(1))
            self.layer = nn.Linear(4, 4)
            self.calls = 0

        def forward(self, x):
            self.steps += 1
            self.calls += 1
            return self.layer(x)

    model = Counting()
    trace(model, torch.randn(2, 4))
    assert (model.calls, float(model.steps)) == (0, 0.0)


# -- models that cannot be captured ---------------------------------------------------------------------


def test_data_dependent_control_flow_is_watched(caplog):
    lines, first = inspect.getsourcelines(DataDependent)
    branch = first + next(number for number, line in enumerate(lines) if "if x.sum()" in line)
    model = DataDependent().eval()
    data = torch.randn(IMAGE)
    with caplog.at_level(logging.WARNING):
        traced = trace(model, data)
    assert traced.program is None
    assert traced.graph is None
    assert traced.failure.where.endswith(f"pytorch_nets.py:{branch}")
    assert "depends on values" in traced.failure.reason
    assert "x.sum() > 0" in str(traced.failure)
    assert "its layers are found by forward hooks" in caplog.text
    taken = "large" if model.norm(model.conv(data)).mean((2, 3)).sum() > 0 else "small"
    assert list(traced.layers) == ["conv", taken]
    assert traced.layers["conv"].input_shapes == (IMAGE,)


def test_nothing_is_printed(capfd):
    trace(DataDependent(), torch.randn(IMAGE))
    assert capfd.readouterr().out == ""


def test_the_users_own_prints_are_kept(capsys):
    def chatty(self, x):
        import sys

        print("hello", file=sys.stderr)
        return self.layer(x)

    trace(Around(nn.Linear(4, 4), chatty), torch.randn(2, 4))
    assert "hello" in capsys.readouterr().err


# -- mistakes -------------------------------------------------------------------------------------------


def test_not_a_model():
    with pytest.raises(ArgumentTypeError, match=r"model: expected a torch\.nn\.Module, got builtin_function_or_method"):
        trace(torch.relu, torch.randn(2))


def test_wrong_shape():
    with pytest.raises(ModelError, match=r"ResNet fails on the example input: .*shapes \[\[2, 5, 8, 8\]\]"):
        trace(ResNet(1), torch.randn(2, 5, 8, 8))


@pytest.mark.parametrize("name", sorted(AMCT_OPERATORS))
def test_a_compressed_model_is_refused(name: str):
    operator = type(name, (nn.Module,), {"forward": lambda _, x: x})()
    with pytest.raises(ModelError, match=rf'1 AMCT operators: "layer" \({name}\)'):
        trace(Around(operator), torch.randn(2))


def test_a_lazy_layer_is_refused():
    with pytest.raises(ModelError, match=r'"layer" \(LazyLinear\) has no weights yet'):
        trace(Around(nn.LazyLinear(4)), torch.randn(2, 6))


def test_a_model_that_cannot_be_copied():
    model = Around(nn.Linear(4, 4))
    model.layer.lock = threading.Lock()
    with pytest.raises(ModelError, match=r'Around cannot be copied \(attribute "lock" of module "layer"\)'):
        trace(model, torch.randn(2, 4))


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch.compile's own imports
@pytest.mark.parametrize(
    "wrapper",
    [nn.DataParallel, torch.compile, lambda model: nn.DataParallel(torch.compile(model))],
    ids=["DataParallel", "compile", "both"],
)
def test_parallel_wrappers_are_taken_off(wrapper):
    assert list(trace(wrapper(Around(nn.Linear(4, 4))), torch.randn(2, 4)).layers) == ["layer"]


def test_distributed_data_parallel_is_taken_off(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Attention(), find_unused_parameters=True)
        assert list(trace(model, torch.randn(2, 5, 8)).layers) == ["q", "k", "v", "o"]
    finally:
        torch.distributed.destroy_process_group()


def test_an_axis_that_the_model_fixes():
    model = Around(nn.Linear(6, 4), lambda self, x: self.layer(x.view(2, 6)))
    why = 'axis 0 of "x" is 2' if SINCE_2_8 else "Constraints violated .*"
    with pytest.raises(ExportError, match=rf'does not let "x" \[0\] vary: {why}\. Leave the axis out'):
        trace(model, torch.randn(2, 6), io=IoOptions(dynamic_axes={"x": {0: "batch"}}))


def test_threads_that_overlap_leave_the_compiler_as_it_was():
    """torch has one stance for the whole process; the first thread to leave must not decide for the other."""
    entered, left = threading.Event(), threading.Event()

    def other_thread() -> None:
        with uncompiled():
            entered.set()
            assert left.wait(30)

    before = torch._dynamo.eval_frame._stance.stance
    thread = threading.Thread(target=other_thread)
    with uncompiled():
        thread.start()
        assert entered.wait(30)
    during = torch._dynamo.eval_frame._stance.stance
    left.set()
    thread.join()
    assert during == "force_eager"
    assert torch._dynamo.eval_frame._stance.stance == before == "default"
