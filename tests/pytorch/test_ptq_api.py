"""Our own API: forms of data and config, the quantized model, comparison; AMCT's functions are a thin layer over it."""

from __future__ import annotations

import json

import pytest
import torch
from ptq_helpers import Flow, difference, images, run_torch, small
from pytorch_nets import case
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import amct.pytorch as amct
from amct.config.python_config import plan_of
from amct.errors import ArgumentError, ArgumentTypeError, CalibrationError, ConfigError, ModelError
from amct.pytorch.capture.trace import trace
from amct.pytorch.inputs import torch_batches
from amct.record import read_record


@pytest.fixture(scope="module")
def model():
    return small()


@pytest.fixture(scope="module")
def quantized(model):
    return amct.quantize(model, [images(0), images(1)])


# -- data ----------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Samples without a length."""

    def __iter__(self):
        return iter([images(0)[0], images(0)[1], images(1)[0], images(1)[1]])


BOTH = torch.cat([images(0), images(1)])
LABELS = torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize(
    "data",
    [
        lambda: [images(0), images(1)],
        lambda: ((images(0),), (images(1),)),
        lambda: (images(seed) for seed in range(2)),
        lambda: iter([[images(0), LABELS[:2]], [images(1), LABELS[2:]]]),
        lambda: [{"x": images(0)}, {"x": images(1)}],
        lambda: [(images(0), {}), (images(1), {})],
        lambda: DataLoader(TensorDataset(BOTH, LABELS), batch_size=2),
        lambda: DataLoader(Stream(), batch_size=2),
    ],
)
def test_data_in_every_form_gives_the_same_factors(data, model, quantized):
    assert amct.quantize(model, data()).record == quantized.record


def test_a_tensor_is_one_batch(model):
    assert amct.quantize(model, BOTH).record == amct.quantize(model, [BOTH]).record


def test_a_function_picks_the_inputs_of_a_batch(model, quantized):
    data = [{"picture": images(seed), "name": "x"} for seed in range(2)]
    assert amct.quantize(model, data, inputs=lambda batch: batch["picture"]).record == quantized.record


class Masked(nn.Module):
    """An optional second argument, which a label must not be taken for."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x, mask=None):
        return self.fc(x if mask is None else x * mask)


@pytest.mark.parametrize(
    ("batch", "arguments"),
    [
        ((torch.ones(3, 4), torch.zeros(3, 4)), 2),  # fits the forward
        ((torch.ones(3, 4), torch.tensor([1, 2, 3])), 1),  # looks like labels
        ((torch.ones(3, 4), torch.zeros(3, 4), torch.tensor([1, 2, 3])), 2),  # more than the forward takes
        ([torch.ones(3, 4)], 1),
        (torch.ones(3, 4), 1),
        ((torch.ones(3, 4), {"mask": torch.zeros(3, 4)}), 1),
    ],
)
def test_labels_are_left_out(batch, arguments):
    (args, _) = torch_batches(Masked(), [batch]).first()
    assert len(args) == arguments


def test_data_that_can_be_read_once_is_kept_only_when_it_is_needed_again(model):
    batches = torch_batches(model, (images(seed) for seed in range(3)))
    first = batches.first()[0][0]
    assert batches.length is None
    assert torch.equal(first, images(0))
    assert len(list(batches)) == 3
    assert list(batches) == []
    kept = torch_batches(model, (images(seed) for seed in range(3)))
    kept.keep()
    assert [len(list(kept.limited(2))), len(list(kept)), len(list(kept.limited(None)))] == [2, 3, 3]
    assert torch_batches(model, [images(0)]).length == 1


def test_once_only_data_serves_balancing_and_learning_too(model):
    config = amct.QuantConfig(
        common=amct.LayerConfig(migration_strength=0.5, weights=amct.AdaRoundSettings(num_iteration=3)), batch_num=2
    )
    found = amct.quantize(model, (images(seed) for seed in range(3)), config)
    assert found.record == amct.quantize(model, [images(0), images(1)], config).record
    assert found.record["c"].tensor_balance_factor


@pytest.mark.parametrize(
    ("data", "kind", "match"),
    [
        ([], CalibrationError, "calibration_data is empty"),
        (iter(()), CalibrationError, "calibration_data is empty"),
        (
            5,
            ArgumentTypeError,
            "calibration_data: expected a tensor, an array, an iterable of batches or a DataLoader, got int",
        ),
        ("data", ArgumentTypeError, "got str"),
        ({"x": images()}, ArgumentError, r"put it into a list: \[batch\]"),
        ([["picture.png"]], ModelError, "calibration_data: expected batches"),
        ([{"wrong": images()}], ModelError, "fails on the example input"),
        ([(images(), {"wrong": images()})], ModelError, "calibration_data does not fit"),
    ],
)
def test_data_that_cannot_be_used(data, kind, match, model):
    with pytest.raises(kind, match=match):
        amct.quantize(model, data)


def test_other_wrong_arguments(model):
    with pytest.raises(ArgumentTypeError, match=r"model: expected a torch\.nn\.Module, got str"):
        amct.quantize("model", images())
    with pytest.raises(ArgumentError, match='adaround: expected "plain" or "fast", got \'quick\''):
        amct.quantize(model, images(), adaround="quick")
    with pytest.raises(ArgumentTypeError, match=r"config: expected the path of a \.cfg or \.json.*got int"):
        amct.quantize(model, images(), 3)


def test_fewer_batches_than_the_config_asks_for(model):
    with pytest.raises(CalibrationError, match='calibrated 0 of 3 layers; 3 more batches needed for "c", "c2", "fc"'):
        amct.quantize(model, [images(0)], amct.QuantConfig(batch_num=4))


class Branch(nn.Module):
    """Two branches, of which a batch takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(self.a(x))


def test_a_layer_that_no_batch_reaches_is_named():
    example, data = -torch.ones(2, 3), torch.ones(2, 3)
    given = iter([example])  # whoever looks at the model sees both branches
    with pytest.raises(CalibrationError, match='no batch reaches 1 of 2 layers: "b"'):
        amct.quantize(Branch(), data, inputs=lambda batch: next(given, batch))


# -- config --------------------------------------------------------------------------------------------------------


def test_config_as_file_dict_and_object_mean_the_same(tmp_path, model):
    cfg = tmp_path / "q.cfg"
    cfg.write_text(
        'batch_num: 2 activation_offset: false skip_layers: "fc" fakequant_precision_mode: FORCE_FP16_QUANT '
        "common_config { arq_quantize { channel_wise: false quant_bits: 7 } hfmg_quantize { num_of_bins: 1024 } }"
        'override_layer_configs { layer_name: "c2" calibration_config { dmq_balancer { migration_strength: 0.3 } '
        "ifmr_quantize { search_range_start: 0.5 search_range_end: 1.5 search_step: 0.1 asymmetric: false "
        "max_percentile: 0.99 min_percentile: 0.98 } } }"
    )
    flow = Flow(tmp_path, model).configure(config_defination=str(cfg))
    options = amct.QuantConfig(
        batch_num=2,
        activation_offset=False,
        skip_layers=("fc",),
        force_fp16=True,
        common=amct.LayerConfig(
            weights=amct.ArqSettings(channel_wise=False, num_bits=7), activations=amct.HfmgSettings(num_of_bins=1024)
        ),
        layers={
            "c2": amct.LayerConfig(
                migration_strength=0.3,
                activations=amct.IfmrSettings(
                    search_range=(0.5, 1.5), search_step=0.1, asymmetric=False, max_percentile=0.99, min_percentile=0.98
                ),
            )
        },
    )
    layers = trace(model, images()).config_layers()
    plans = [
        plan_of(form, layers, None) for form in (cfg, str(flow.config), json.loads(flow.config.read_text()), options)
    ]
    assert all(not open_ended for _, open_ended in plans)
    assert [plan.layers for plan, _ in plans] == [plans[0][0].layers] * 4
    assert all(plan.force_fp16 and plan.batch_num == 2 for plan, _ in plans)


def test_a_config_object_is_adjusted_to_what_layers_can_have():
    net = case("conv1d3d")
    layers = trace(net.model(), net.inputs()).config_layers()
    common = amct.LayerConfig(
        weights=amct.AdaRoundSettings(num_bits=4, num_iteration=7), activations=amct.IfmrSettings(num_bits=16)
    )
    options = amct.QuantConfig(common=common, types={"Conv1d": amct.LayerConfig()}, do_fusion=False)
    plan, open_ended = plan_of(options, layers, 5)
    assert open_ended
    assert plan.batch_num == 5
    assert not plan.do_fusion
    by_name = {layer.name: layer for layer in plan.layers}
    assert isinstance(by_name["c3"].weight, amct.ArqSettings)
    assert by_name["c3"].activation.num_bits == 8
    assert by_name["c1"].activation == amct.IfmrSettings()


def test_bits_of_adaround_can_be_chosen_in_a_config_object(model):
    options = amct.QuantConfig(
        common=amct.LayerConfig(weights=amct.AdaRoundSettings(num_bits=4)),
        layers={"fc": amct.LayerConfig(weights=amct.AdaRoundSettings(num_bits=3, channel_wise=False))},
    )
    plan, _ = plan_of(options, trace(model, images()).config_layers(), 1)
    assert {layer.name: layer.weight.num_bits for layer in plan.layers} == {
        "c": 8,
        "c2": 4,
        "fc": 3,
    }  # 3 inputs: no pairs


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (amct.QuantConfig(skip_layers=("cc",)), r'"cc".*Did you mean "c"'),
        (amct.QuantConfig(skip_layer_types=("Conv2d", "Linear")), "switch off every layer"),
        (
            amct.QuantConfig(common=amct.LayerConfig(activations=amct.IfmrSettings(num_bits=6))),
            "4 or 8 or 16 bits here, got 6",
        ),
        (amct.QuantConfig(layers={"fc": amct.LayerConfig(migration_strength=3.0)}), "at least 0.2 and at most 0.8"),
        (amct.QuantConfig(batch_num=0), "batch_num must be at least 1"),
    ],
)
def test_config_objects_that_cannot_be_used(options, match, model):
    with pytest.raises(ConfigError, match=match):
        amct.quantize(model, images(), options)


# -- the quantized model -------------------------------------------------------------------------------------------


def test_amct_functions_find_the_same_record(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flow = Flow(tmp_path, model).configure(batch_num=2)
    calibrating = flow.quantize()
    for seed in range(2):
        calibrating(images(seed))
    as_amct = amct.QuantConfig(weight_rounding="nearest", bias_correction=False)
    quantized = amct.quantize(model, [images(seed) for seed in range(2)], as_amct, io=amct.IoOptions(dynamic_axes={}))
    assert read_record(flow.record) == quantized.record
    quantized.save(tmp_path / "own" / "q")
    flow.save()
    for name in ("q_deploy_model.onnx", "q_fake_quant_model.onnx", "q_qdq_model.onnx"):
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    assert read_record(tmp_path / "own" / "q_record.txt") == quantized.record
    assert (tmp_path / "own" / "q_record.txt.qdq.json").read_bytes() == (tmp_path / "r.txt.qdq.json").read_bytes()


def test_the_simulated_model_rounds_inputs_and_weights_to_their_grids(quantized):
    seen = {}
    handles = [
        quantized.model.get_submodule(name).register_forward_hook(
            lambda module, args, _, name=name: seen.update({name: (module, args[0])})
        )
        for name in quantized.layers
    ]
    quantized.model(images(7))
    for handle in handles:
        handle.remove()
    for name, (module, x) in seen.items():
        entry = quantized.record[name]
        steps = x / entry.scale_d
        assert torch.allclose(steps, steps.round(), atol=1e-3)
        assert steps.round().min() >= -128 - entry.offset_d
        assert steps.round().max() <= 127 - entry.offset_d
        scales = torch.tensor(entry.scale_w).reshape(-1, *[1] * (module.weight.ndim - 1))
        assert torch.allclose(module.weight / scales, (module.weight / scales).round(), atol=1e-3)
        steps = module.bias.double() / (torch.tensor(entry.scale_w).double() * entry.scale_d)
        assert torch.allclose(steps, steps.round(), atol=2e-2)  # float32 holds 24 bits of it


def test_the_simulated_model_is_near_the_float_model(model, quantized):
    expected = run_torch(model, images(3))
    assert difference(run_torch(quantized.model, images(3)), expected) < 0.05 * abs(expected[0]).max()


def test_summary_counts_and_gives_reasons():
    net = case("attention")
    quantized = amct.quantize(net.model(), [net.inputs()], amct.QuantConfig(skip_layers=("q",)))
    text = quantized.summary()
    assert text.splitlines()[0] == "Attention: 3 layers quantized, 0 batch norms folded"
    assert "3 with int8 activations, int8 weights" in text
    assert "LayerNorm is not quantizable" in text
    assert "q " in text


def test_comparison_tells_what_each_layer_loses(model, quantized):
    found = quantized.compare([images(5), images(6)])
    assert [layer.layer for layer in found] == ["c", "c2", "fc"]
    assert all(0.99 < layer.cosine <= 1 and 20 < layer.sqnr < 80 for layer in found)
    assert found[0].values == 2 * 2 * 8 * 64
    coarse = amct.quantize(model, images(), amct.QuantConfig(types={"Conv2d": coarse_weights()}))
    worse = {layer.layer: layer.sqnr for layer in coarse.compare(images(5))}
    assert worse["c2"] < found[1].sqnr - 10
    assert not quantized.model.c._forward_hooks


def coarse_weights():
    return amct.LayerConfig(weights=amct.ArqSettings(num_bits=4))


def test_formats_choose_what_is_written(quantized, tmp_path):
    written = quantized.save(tmp_path / "a" / "q", formats=["record"])
    assert [path.name for path in written] == ["q_record.txt", "q_record.txt.qdq.json"]
    written = quantized.save(tmp_path / "b" / "q", formats="fake_quant")
    assert [path.name for path in written] == ["q_fake_quant_model.onnx", "q_quant.json"]
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["q_fake_quant_model.onnx", "q_quant.json"]


def test_a_folder_that_cannot_be_written(quantized):
    with pytest.raises(OSError, match="cannot write"):
        quantized.save("/proc/amct/q")
