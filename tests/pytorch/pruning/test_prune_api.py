"""``amct.pytorch.prune``: reach, alignment, settings, data, files, reports, mistakes."""

from __future__ import annotations

import copy
import re

import onnxruntime
import pytest
import torch
from prune_nets import filters, retrain_net
from torch import nn
from torch.nn import functional

import amct.pytorch
from amct.errors import ArgumentError, ConfigError, ExportError, ModelError, RecordError
from amct.model.quant_json import read_quant_json
from amct.report.runs import compare_runs


@pytest.fixture
def net():
    model, batches = retrain_net()
    return model.eval(), batches


def channels(result):
    return {name: after for name, (_, after) in result.channels.items()}


def test_full_reach_goes_through_depthwise_and_flatten(net):
    model, batches = net
    result = amct.pytorch.prune(model, batches[0], 0.5)
    assert channels(result) == {"c1": 8, "c2": 16, "c3": 16, "fc1": 24, "fc": 10}
    assert result.model.dw.groups == 16
    assert result.model.fc1.in_features == 64
    consumer = next(chain for chain in result.record.prune if chain.producers[0].name == "c3").node("fc1")
    assert (consumer.begin, consumer.end, consumer.get("repeat"), len(consumer.prune_index)) == (0, 32, 4, 16)
    assert [str(skip) for skip in result.skipped] == ['"fc": its channels are an output of the model']


def test_amct_reach_is_shorter(net):
    model, batches = net
    result = amct.pytorch.prune(model, batches[0], 0.3, reach="amct")
    assert channels(result) == {"c1": 11, "c2": 22, "c3": 32, "fc1": 34, "fc": 10}
    assert {skip.layer for skip in result.skipped} == {"c3", "dw", "fc"}


@pytest.mark.parametrize(
    ("align", "allowed"),
    [
        (1, [{11}, {22}, {22}, {34}]),
        (8, [{8, 16}, {16, 24}, {16, 24}, {32, 40}]),
        (16, [{16}, {16, 32}, {16, 32}, {32, 48}]),
    ],
)
def test_channels_left_are_multiples_next_to_the_ratio(net, align, allowed):
    model, batches = net
    found = channels(amct.pytorch.prune(model, batches[0], 0.3, align=align))
    for name, counts in zip(("c1", "c2", "c3", "fc1"), allowed, strict=True):
        assert found[name] in counts


def test_flops_are_a_limit(net):
    model, batches = net
    result = amct.pytorch.prune(model, batches[0], flops=0.6, align=1)
    assert 0.5 < result.after.macs / result.before.macs <= 0.6


def test_config_with_ratios_and_skips(net, tmp_path):
    model, batches = net
    more = f'regular_prune_skip_layers: "c1" override_layer_configs {{ layer_name: "c2" {filters(0.5)} }}'
    (tmp_path / "prune.cfg").write_text(filters(0.25, more=more))
    result = amct.pytorch.prune(model, batches[0], config=tmp_path / "prune.cfg", align=1)
    assert channels(result) == {"c1": 16, "c2": 16, "c3": 24, "fc1": 36, "fc": 10}
    assert "switched off" in {skip.layer: skip.reason for skip in result.skipped}["c1"]


def test_data_improves_the_pruned_model(net):
    model, batches = net
    expected = model(batches[0])
    plain, fitted = (amct.pytorch.prune(model, batches[0], 0.5, batches=data).model for data in (None, batches))
    assert (fitted(batches[0]) - expected).norm() < 0.7 * (plain(batches[0]) - expected).norm()


def test_batch_norms_have_the_statistics_of_the_data(net):
    model, batches = net
    result = amct.pytorch.prune(model, batches[0], 0.5, batches=batches)
    seen = [result.model.c1(batch) for batch in batches]
    mean = torch.stack([each.mean((0, 2, 3)) for each in seen]).mean(0)
    torch.testing.assert_close(result.model.b1.running_mean, mean, rtol=1e-4, atol=1e-6)
    assert (result.model.b1.momentum, result.model.training) == (0.1, False)


def test_bfloat16_is_not_written_because_nobody_could_run_the_file(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).bfloat16()
    pruned = amct.pytorch.prune(net, torch.randn(1, 3, 8, 8).bfloat16(), ratio=0.5, align=1)
    with pytest.raises(ExportError, match=r'parameter "0\.weight".*bfloat16.*model\.float\(\)'):
        pruned.save(tmp_path / "net")
    assert list(tmp_path.iterdir()) == []


def test_save_report_and_restore(net, tmp_path):
    model, batches = net
    result = amct.pytorch.prune(model, batches[0], batches=batches)
    files = result.save(tmp_path / "net")
    assert [file.name for file in files] == [
        "net_float_model.onnx", "net_state.pth", "net_record.txt", "net_quant.json",
    ]  # fmt: skip
    session = onnxruntime.InferenceSession(str(files[0]))
    (found,) = session.run(None, {session.get_inputs()[0].name: batches[0].numpy()})
    assert abs(found - result.model(batches[0]).detach().numpy()).max() < 1e-5
    restored = amct.pytorch.restore_pruned(model, tmp_path / "net_record.txt", tmp_path / "net_state.pth")
    torch.testing.assert_close(restored(batches[0]), result.model(batches[0]), rtol=0, atol=0)

    def spread(output, _batch):
        return float(output.std())

    page = result.report(tmp_path / "report.html", batches, spread, files=files).read_text()
    for text in (
        "Pruning report",
        "spread",
        "parameters",
        "onnxruntime",
        "net_float_model.onnx",
        "c3",
        "<td>its channels",
    ):
        assert text in page
    left = result.channels["c2"][1]
    assert f"c2   32 → {left} channels" in result.summary()
    assert min(result.latency()) > 0


def test_a_pruned_model_is_trained_quantized(net):
    model, batches = net
    pruned = amct.pytorch.prune(model, batches[0], batches=batches)
    trainable = amct.pytorch.prepare_qat(pruned.model, batches)
    trainable(batches[0]).sum().backward()
    inputs, outputs = (pruned.channels[name][1] for name in ("c1", "c2"))
    assert trainable.c2.weight.grad.shape == (outputs, inputs, 3, 3)


class Literal(nn.Module):
    """A size of a tensor, computed or literal."""

    def __init__(self, literal):
        super().__init__()
        self.literal = literal
        self.first, self.last = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        x = self.first(x)
        sizes = [8, 8] if self.literal else [x.shape[1] // 2, x.shape[1] - x.shape[1] // 2]
        a, b = torch.split(x, sizes, 1)
        return self.last(torch.cat([b, a], 1))


def test_literal_sizes_end_a_chain_and_computed_ones_do_not():
    computed = amct.pytorch.prune(Literal(literal=False), torch.randn(1, 3, 4, 4), 0.5)
    assert computed.channels["first"] == (16, 8)
    literal = amct.pytorch.prune(Literal(literal=True), torch.randn(1, 3, 4, 4), 0.5)
    assert literal.channels["first"] == (16, 16)
    reason = literal.skipped[0].reason
    assert "has a literal size" in reason
    assert "test_prune_api.py:" in reason


def literal_view(x, net):
    return net.last(torch.relu(net.first(x)).view(-1, 16, 4, 4))


def through_unknown(x, net):
    return net.last(torch.fft.fft(net.first(x)).real)


class Between(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)
        self.function = forward

    def forward(self, x):
        return self.function(x, self)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (literal_view, "view .*literal size"),
        (through_unknown, "fft_fft .*ends the chain: its channels cannot be followed"),
        (lambda x, net: net.last(net.first(x)[:, list(range(16))]), "index .*ends the chain"),
        (lambda x, net: net.last(net.first(x)) + net.first(x).mean(), "mean .*reduces over all channels"),
        (lambda x, net: net.last(net.first(x).softmax(1)), "softmax .*mixes the channels"),
    ],
)
def test_the_reason_names_the_operation(function, reason):
    result = amct.pytorch.prune(Between(function), torch.randn(1, 3, 4, 4), 0.5)
    assert result.channels["first"] == (16, 16)
    found = {skip.layer: skip.reason for skip in result.skipped}["first"]
    assert re.search(reason, found), found


class Shortcut(nn.Module):
    """The zero-padded shortcut of the CIFAR ResNets."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.wide = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.last = nn.Linear(32, 5)

    def forward(self, x):
        x = self.stem(x)
        x = torch.relu(self.wide(x) + functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 8, 8)))
        return self.last(functional.avg_pool2d(x, x.shape[3]).flatten(1))


def test_through_a_zero_padded_shortcut():
    result = amct.pytorch.prune(Shortcut(), torch.randn(2, 3, 8, 8), 0.5)
    assert channels(result) == {"stem": 8, "wide": 24, "last": 5}
    wide = result.record.prune[0].node("wide").prune_index
    assert [index - 8 for index in wide] == list(result.record.prune[0].node("stem").prune_index)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 32)
        self.position = nn.Parameter(torch.randn(1, 5, 32))
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.last = nn.Linear(32, 3)

    def forward(self, x):
        x = self.embed(x) + self.position
        return self.last((x + self.down(functional.gelu(self.up(self.norm(x))))).mean(1))


def test_mlp_stream_and_parameters_of_a_transformer(tmp_path):
    model, x = Transformer(), torch.randn(2, 5, 6)
    result = amct.pytorch.prune(model, x, 0.5)
    assert channels(result) == {"embed": 16, "up": 32, "down": 16, "last": 3}
    assert result.model.position.shape == (1, 5, 16)
    assert result.model.norm.normalized_shape == (16,)
    result.save(tmp_path / "net")
    restored = amct.pytorch.restore_pruned(model, tmp_path / "net_record.txt", tmp_path / "net_state.pth").eval()
    torch.testing.assert_close(restored(x), result.model.eval()(x), rtol=0, atol=0)


def test_control_flow_on_values_is_an_error():
    class Dynamic(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x) if x.sum() > 0 else x

    with pytest.raises(ModelError, match="cannot be captured"):
        amct.pytorch.prune(Dynamic(), torch.ones(1, 4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": 1.5}, "ratio: expected a number between 0 and 1"),
        ({"ratio": 0.3, "flops": 0.5}, "ratio and flops: give one"),
        ({"align": 0}, "align: expected a whole number"),
        ({"reach": "far"}, 'reach: expected "full" or "amct"'),
        ({"flops": 0.5, "reach": "amct"}, "flops: only with"),
    ],
)
def test_wrong_settings(net, settings, message):
    model, batches = net
    with pytest.raises(ArgumentError, match=message):
        amct.pytorch.prune(model, batches[0], **settings)


def test_wrong_model_and_records(net, tmp_path):
    model, batches = net
    with pytest.raises(TypeError, match="model: expected"):
        amct.pytorch.prune("net", batches[0])
    (tmp_path / "sparse.cfg").write_text("prune_config { n_out_of_m_pruner { l1_selective_prune { } } }")
    with pytest.raises(ConfigError, match="it prunes no channels"):
        amct.pytorch.prune(model, batches[0], config=tmp_path / "sparse.cfg")
    record = amct.pytorch.prune(model, batches[0]).record
    with pytest.raises(RecordError, match="no such layer"):
        amct.pytorch.restore_pruned(nn.Sequential(nn.Linear(2, 2)), record)
    with pytest.raises(RecordError, match="expected the removed channels"):
        amct.pytorch.restore_pruned(copy.deepcopy(model), amct.pytorch.Record())


class TransposedConv(nn.Conv1d):
    """A Conv1d of sequences of vectors."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("head", "shape"),
    [(TransposedConv(16, 16, 1), (2, 16, 10)), (TransposedConv(16, 4, 1), (2, 7, 10)), (nn.Linear(16, 4), (7, 10))],
)
def test_a_layer_is_fitted_to_what_its_operation_reads(head, shape):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), head).eval(), torch.randn(*shape)
    with torch.no_grad():
        model[0].weight[:8], model[0].bias[:8] = model[0].weight[8:], model[0].bias[8:]  # each channel is there twice
    pruned = amct.pytorch.prune(model, x, 0.5, batches=[x]).model
    assert pruned[0].out_features == 8
    torch.testing.assert_close(pruned(x), model(x), atol=1e-3, rtol=1e-3)


class Functions(nn.Module):
    """A convolution, a batch norm and a depthwise convolution that are functions."""

    def __init__(self, *, literal):
        super().__init__()
        self.first, self.depthwise = nn.Parameter(torch.randn(16, 3, 3, 3)), nn.Parameter(torch.randn(16, 1, 3, 3))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("var", torch.ones(16))
        self.last, self.literal = nn.Linear(16, 4), literal

    def forward(self, x):
        y = functional.batch_norm(functional.conv2d(x, self.first), self.mean, self.var)
        y = functional.conv2d(y, self.depthwise, groups=16 if self.literal else y.shape[1])
        return self.last(y.mean((2, 3)))


@pytest.mark.parametrize(("literal", "left"), [(False, 8), (True, 16)])
def test_channels_of_functions(literal, left):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    result = amct.pytorch.prune(Functions(literal=literal).eval(), x, 0.5)
    assert result.channels["first"] == (16, left)
    assert (len(result.model.mean), len(result.model.depthwise), result.model.last.in_features) == (left,) * 3
    assert result.model(x).shape == (2, 4)


def test_a_config_with_both_kinds_of_pruning(net, tmp_path):
    model, batches = net
    sparse = 'override_layer_configs { layer_name: "c2" prune_config { n_out_of_m_pruner { l1_selective_prune { } } } }'
    (tmp_path / "both.cfg").write_text(filters(0.5, more=sparse))
    with pytest.raises(ConfigError, match='gives "c2" 2:4 sparsity; both at once are done with reach="amct" only'):
        amct.pytorch.prune(model, batches[0], config=tmp_path / "both.cfg")
    result = amct.pytorch.prune(model, batches[0], config=tmp_path / "both.cfg", reach="amct")
    assert any(chain.selective is not None for chain in result.record.prune)


def test_quant_json_of_pruned_models_is_read_again(net, tmp_path):
    model, batches = net
    for name in ("one", "other", "other"):  # the third one replaces the second
        amct.pytorch.prune(model, batches[0]).save(tmp_path / name)
    documents = [tmp_path / "one_quant.json", tmp_path / "other_quant.json"]
    assert set(read_quant_json(documents[1]).files) == {
        "other_float_model.onnx",
        "other_state.pth",
        "other_record.txt",
    }
    assert compare_runs(documents).names == ("one", "other")


class Returns(nn.Module):
    """Links its features by a sparse matrix, and returns what it is told to."""

    def __init__(self, result):
        super().__init__()
        self.a, self.b, self.result = nn.Linear(8, 8), nn.Linear(8, 3), result
        self.register_buffer("links", torch.eye(8).to_sparse_csr())

    def forward(self, x):
        return self.result(self.b((self.links @ self.a(x).t()).t()))


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")  # torch says that they may change
def test_channels_of_a_sparse_buffer_stay():
    result = amct.pytorch.prune(Returns(lambda y: y), torch.randn(2, 8), 0.5, align=1)
    assert [str(skip) for skip in result.skipped if skip.layer == "a"] == ['"a": links is sparse']


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_a_forward_without_a_result_has_no_file(tmp_path):
    result = amct.pytorch.prune(Returns(lambda _: None), torch.randn(2, 8), 0.5, align=1)
    with pytest.raises(ExportError, match="the forward of Returns returns no tensor that a file could compute"):
        result.save(tmp_path / "net")
