"""Single quantization-aware modules: AMCT's names and errors, the float64 formula, checkpoints, ONNX files."""

from __future__ import annotations

import copy
import importlib
import io
import logging
import pickle
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import amct_pytorch as amct
from amct.errors import CalibrationError, ExportError, ModelError
from amct.pytorch import quantize
from amct.pytorch.capture.program import quiet_exporters

FILES = {
    "conv1d": "Conv1dQAT",
    "conv2d": "Conv2dQAT",
    "conv3d": "Conv3dQAT",
    "conv_transpose_1d": "ConvTranspose1dQAT",
    "conv_transpose_2d": "ConvTranspose2dQAT",
    "linear": "LinearQAT",
    "lstm": "LSTMQAT",
    "gru": "GRUQAT",
    "matmul": "MatMulQAT",
}
LEARNED = {"retrain_weight_config": {"weights_retrain_algo": "ulq_retrain"}}
INT16 = {"retrain_data_config": {"dst_type": "INT16"}}
PER_TENSOR = {"retrain_weight_config": {"channel_wise": False}}

MODULES = {
    "Conv1dQAT": lambda config=None: amct.Conv1dQAT(4, 6, 3, padding=1, config=config),
    "Conv2dQAT": lambda config=None: amct.Conv2dQAT(4, 6, 3, padding=1, groups=2, config=config),
    "Conv3dQAT": lambda config=None: amct.Conv3dQAT(2, 4, 3, bias=False, config=config),
    "ConvTranspose1dQAT": lambda config=None: amct.ConvTranspose1dQAT(4, 6, 3, stride=2, config=config),
    "ConvTranspose2dQAT": lambda config=None: amct.ConvTranspose2dQAT(4, 6, 3, stride=2, groups=2, config=config),
    "LinearQAT": lambda config=None: amct.LinearQAT(5, 7, config=config),
    "LSTMQAT": lambda config=None: amct.LSTMQAT(4, 5, batch_first=True, config=config),
    "GRUQAT": lambda config=None: amct.GRUQAT(4, 5, config=config),
    "MatMulQAT": lambda config=None: amct.MatMulQAT(config=config),
}


def inputs_of(name):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    if name == "LSTMQAT":
        return draw(3, 6, 4), (draw(1, 3, 5).tanh(), draw(1, 3, 5))
    if name == "GRUQAT":
        return draw(6, 3, 4), draw(1, 3, 5).tanh()
    shapes = {
        "Conv1dQAT": [(2, 4, 9)],
        "Conv2dQAT": [(2, 4, 7, 7)],
        "Conv3dQAT": [(1, 2, 5, 5, 5)],
        "ConvTranspose1dQAT": [(2, 4, 7)],
        "ConvTranspose2dQAT": [(2, 4, 5, 5)],
        "LinearQAT": [(3, 4, 5)],
        "MatMulQAT": [(2, 3, 4), (2, 4, 5)],
    }
    return tuple(draw(*shape) for shape in shapes[name])


def main_output(result):
    return result[0] if isinstance(result, tuple) else result


def trained(name, config=None, steps=3):
    """A module after a few steps of training."""
    torch.manual_seed(0)
    module, inputs = MODULES[name](config), inputs_of(name)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    module(*inputs)  # the first forward determines the clips
    for _ in range(steps):
        optimizer.zero_grad()
        main_output(module(*inputs)).square().mean().backward()
        optimizer.step()
    return module, inputs


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES)
def test_the_import_paths_of_the_reference(file):
    found = importlib.import_module(f"amct_pytorch.nn.module.quantization.{file}")
    assert getattr(found, FILES[file]) is getattr(amct, FILES[file])


def test_the_state_has_the_names_of_the_reference():
    module = amct.Conv2dQAT(4, 6, 3, config=INT16)
    parameters = {name: value for name, value in module.named_parameters() if name not in ("weight", "bias")}
    assert list(parameters) == ["acts_clip_max", "acts_clip_min", "wts_scales", "wts_offsets"]
    assert (module.acts_clip_max.item(), module.acts_clip_min.item()) == (1.0, -1.0)
    assert module.wts_scales.shape == module.wts_offsets.shape == (6,)
    assert all(torch.isnan(value).all() for value in (module.wts_scales, module.wts_offsets, module.acts_scale))
    assert [value.requires_grad for value in parameters.values()] == [True, True, False, False]
    assert amct.Conv2dQAT(4, 6, 3, config=LEARNED).wts_scales.requires_grad
    assert set(dict(module.named_buffers())) == {
        *("acts_clip_max_pre", "acts_clip_min_pre", "acts_scale", "acts_offset_deploy", "wts_offsets_deploy"),
        *("cur_batch", "s_rec_flag"),
    }
    assert module.acts_offset_deploy.dtype is torch.int16
    assert amct.Conv2dQAT(4, 6, 3).acts_offset_deploy.dtype is module.wts_offsets_deploy.dtype is torch.int8


def test_arguments_are_those_of_torch():
    module = amct.Conv2dQAT(4, 6, (3, 5), (1, 2), (1, 0), 1, 2, False, "zeros", "cpu", torch.float32, None)
    assert isinstance(module, nn.Conv2d)
    assert (module.kernel_size, module.stride, module.groups, module.bias) == ((3, 5), (1, 2), 2, None)
    module = amct.LSTMQAT(4, 5, 1, True, True, 0.0, False, 0)
    assert isinstance(module, nn.LSTM)
    assert module.batch_first


# -- what they compute -------------------------------------------------------------------------------------------------


def formula_input(x, clip_min, clip_max, bits=8):
    """The spec's formula in float64."""
    x, low, high = x.double(), clip_min, clip_max
    scale = (high - low) / (2**bits - 1)
    offset = np.round(-(2 ** (bits - 1)) - low / scale)
    integers = ((x / scale).round() + offset).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (integers - offset) * scale, scale


def formula_weight(weight, dims):
    """The spec's formula in float64: one scale for all values along ``dims``."""
    weight = weight.detach().double()
    low, high = weight.amin(dims, keepdim=True), weight.amax(dims, keepdim=True)
    scale = torch.where(high >= -low, high / 127, -low / 128)
    return (weight / scale).round().clamp(-128, 127) * scale


def expected(name, module, inputs):
    x, _ = formula_input(inputs[0], module.acts_clip_min.item(), module.acts_clip_max.item())
    if name == "MatMulQAT":
        return x @ formula_input(inputs[1], module.acts_other_clip_min.item(), module.acts_other_clip_max.item())[0]
    bias = None if getattr(module, "bias", None) is None else module.bias
    if name == "LinearQAT":
        return functional.linear(x, formula_weight(module.weight, (0, 1)), bias.double())
    if name == "ConvTranspose2dQAT":
        grouped = module.weight.detach().reshape(2, 2, 3, 3, 3)  # groups, in per group, out per group, kernel
        weight = formula_weight(grouped, (1, 3, 4)).reshape(module.weight.shape)
        return functional.conv_transpose2d(x, weight, bias.double(), 2, groups=2)
    if name == "ConvTranspose1dQAT":
        return functional.conv_transpose1d(x, formula_weight(module.weight, (0, 2)), bias.double(), 2)
    if name in ("LSTMQAT", "GRUQAT"):
        return recurrent(module, x, inputs[1])
    weight = formula_weight(module.weight, tuple(range(1, module.weight.ndim)))
    convolve = {"Conv1dQAT": functional.conv1d, "Conv2dQAT": functional.conv2d, "Conv3dQAT": functional.conv3d}[name]
    bias = None if bias is None else bias.double()
    return convolve(x, weight, bias, padding=module.padding, groups=module.groups)


def recurrent(module, x, state):
    plain = getattr(nn, type(module).__name__.removesuffix("QAT"))(4, 5, batch_first=module.batch_first).double()
    with torch.no_grad():
        for name in ("weight_ih_l0", "weight_hh_l0"):
            getattr(plain, name).copy_(formula_weight(getattr(module, name), (1,)))
        for name in ("bias_ih_l0", "bias_hh_l0"):
            getattr(plain, name).copy_(getattr(module, name))
    pair = isinstance(state, tuple)
    h, _ = formula_input(state[0] if pair else state, -1.0, 1.0)
    return plain(x, (h, state[1].double()) if pair else h)[0]


@pytest.mark.parametrize("name", MODULES)
def test_they_compute_the_formula(name):
    module, inputs = trained(name)
    with torch.no_grad():
        found = main_output(module(*inputs))
        wanted = expected(name, module, inputs)
    # Rounding in float32 may move a value near a tie to the next integer; here no value is that near.
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    plain = copy.deepcopy(module)
    plain.config = amct.LinearQAT(1, 1, config={"retrain_enable": False}).config
    assert (main_output(plain(*inputs)) - found).abs().max() > 1e-4  # it is not the float module


@pytest.mark.parametrize("name", MODULES)
def test_eval_computes_the_same_and_changes_nothing(name):
    module, inputs = trained(name, LEARNED if name != "LinearQAT" else None)
    before = main_output(module(*inputs)).detach()
    state = copy.deepcopy(module.state_dict())
    module.eval()
    with torch.no_grad():
        after = main_output(module(*inputs))
    assert torch.equal(after, before)
    assert not after.requires_grad
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())


def test_the_float_weight_is_kept_and_small_updates_add_up():
    torch.manual_seed(0)
    module = amct.Conv2dQAT(4, 6, 3)
    before = module.weight.detach().clone()
    x = torch.randn(2, 4, 7, 7)
    for _ in range(3):
        module(x)
    assert torch.equal(module.weight, before)
    optimizer = torch.optim.SGD([module.weight], 1.0)
    step = float(module.wts_scales.min()) / 50  # a fiftieth of a step of the grid: rounded away if it were not kept
    for _ in range(100):
        optimizer.zero_grad()
        module(x).sum().backward()
        module.weight.grad = torch.full_like(module.weight, step)
        optimizer.step()
    assert torch.allclose(before - module.weight, torch.tensor(100 * step), rtol=1e-3)


def test_the_first_forwards_determine_the_clips_and_pass_the_input_on():
    torch.manual_seed(0)
    module = amct.LinearQAT(5, 7, config={"retrain_data_config": {"batch_num": 2}})
    x, weight = torch.randn(200, 5), None
    for number in (1, 2):
        output = module(x)
        weight = formula_weight(module.weight, (0, 1)).float()
        assert torch.allclose(output, functional.linear(x, weight, module.bias), atol=1e-6)
        assert int(module.cur_batch) == number
    assert torch.isnan(module.acts_clip_max_pre) == (number == 1)
    high = float(x.abs().max())
    assert 0.7 * high <= module.acts_clip_max.item() <= 1.3 * high
    assert module.acts_clip_min.item() < 0
    later = module(x)
    assert not torch.equal(later, output)
    assert int(module.cur_batch) == 2
    assert module.acts_scale.item() == pytest.approx(
        (module.acts_clip_max - module.acts_clip_min).item() / 255, rel=1e-6
    )


def test_given_clips_apply_from_the_first_forward():
    config = {"retrain_data_config": {"clip_max": 2.0, "clip_min": -1.0}}
    module, x = amct.LinearQAT(5, 7, config=config), torch.randn(4, 5) * 3
    assert torch.allclose(module(x).double(), expected("LinearQAT", module, [x]), atol=1e-5)
    fixed = amct.LinearQAT(5, 7, config={"retrain_data_config": {"clip_max": 2.0, "fixed_min": True}})
    fixed(x).sum().backward()
    assert fixed.acts_clip_min.item() == 0
    assert fixed.acts_clip_min.grad is None
    assert fixed.acts_clip_max.grad is not None
    assert int(fixed.acts_offset_deploy) == -128


def test_clips_that_an_optimizer_made_illegal_are_the_last_legal_ones():
    module, (x,) = trained("LinearQAT")
    module(x)
    legal = module.acts_clip_max.item(), module.acts_clip_min.item()
    with torch.no_grad():
        module.acts_clip_max.fill_(-3.0)
    assert torch.isfinite(module(x)).all()
    assert (module.acts_clip_max.item(), module.acts_clip_min.item()) == legal


def test_learned_scales_are_trained_and_measured_ones_follow_the_weight():
    for config, learned in ((LEARNED, True), (None, False)):
        module, inputs = trained("Conv2dQAT", config, steps=1)
        module(*inputs)
        before = module.wts_scales.detach().clone()
        with torch.no_grad():
            module.weight *= 2
        module(*inputs)
        assert torch.allclose(module.wts_scales, before if learned else before * 2)
        assert (module.wts_scales.grad is not None) == learned
        assert torch.equal(module.wts_offsets, torch.zeros(6))
    module, inputs = trained("Conv2dQAT", LEARNED)
    with torch.no_grad():
        module.wts_scales[0] = -1.0  # an optimizer knows no limits
    module(*inputs)
    assert (module.wts_scales > 0).all()


def test_half_precision_and_autocast():
    module, (x,) = trained("Conv2dQAT")
    with torch.autocast("cpu", torch.bfloat16):
        output = module(x)
    assert output.dtype is torch.bfloat16
    assert (output - module(x)).abs().max() < 0.05 * module(x).abs().max()  # 8 bits of mantissa, 36 products
    output.float().square().mean().backward()
    assert torch.isfinite(module.acts_clip_max.grad)


def test_gradient_checkpointing_observes_a_batch_once():
    outcomes = []
    for saves in (False, True):
        torch.manual_seed(0)
        module = amct.LinearQAT(5, 7, config={"retrain_data_config": {"batch_num": 2}})
        x = inputs_of("LinearQAT")[0].requires_grad_()
        for _ in range(4):
            output = checkpoint(module, x, use_reentrant=False) if saves else module(x)
            output.square().mean().backward()
        outcomes.append([module.cur_batch, module.acts_clip_max, module.weight.grad, x.grad])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.filterwarnings("ignore")  # of dynamo, about its own accesses
def test_a_compiled_module_computes_the_same():
    module, (x,) = trained("Conv2dQAT", steps=1)
    fresh = amct.Conv2dQAT(4, 6, 3, padding=1, groups=2)
    fresh.load_state_dict(
        {name: value for name, value in module.state_dict().items() if name in ("weight", "bias")}, strict=False
    )
    compiled, plain = torch.compile(copy.deepcopy(fresh), backend="eager"), fresh
    for _ in range(3):
        assert torch.allclose(compiled(x), plain(x), atol=1e-6)
    assert torch.equal(compiled.state_dict()["_orig_mod.acts_clip_max"], plain.acts_clip_max)


# -- copies and checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_copies_pickles_and_checkpoints(name):
    module, inputs = trained(name)
    wanted = main_output(module(*inputs))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = MODULES[name]()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert torch.equal(main_output(twin(*inputs)), wanted)
        main_output(twin(*inputs)).sum().backward()
    assert torch.equal(main_output(module(*inputs)), wanted)


def test_a_fresh_process_computes_the_same(tmp_path):
    modules = {name: trained(name) for name in ("Conv2dQAT", "ConvTranspose2dQAT", "LSTMQAT", "LinearQAT")}
    states = {name: module.state_dict() for name, (module, _) in modules.items()}
    wanted = {name: main_output(module.eval()(*inputs)).detach() for name, (module, inputs) in modules.items()}
    torch.save((states, {name: inputs for name, (_, inputs) in modules.items()}, wanted), tmp_path / "all.pt")
    program = """
import sys, torch, amct_pytorch as amct
states, inputs, wanted = torch.load(sys.argv[1], weights_only=True)
made = dict(Conv2dQAT=amct.Conv2dQAT(4, 6, 3, padding=1, groups=2), LinearQAT=amct.LinearQAT(5, 7))
made["ConvTranspose2dQAT"] = amct.ConvTranspose2dQAT(4, 6, 3, stride=2, groups=2)
made["LSTMQAT"] = amct.LSTMQAT(4, 5, batch_first=True)
for name, module in made.items():
    module.load_state_dict(states[name])
    found = module.eval()(*inputs[name])
    assert torch.equal(found[0] if isinstance(found, tuple) else found, wanted[name]), name
"""
    subprocess.run([sys.executable, "-c", program, tmp_path / "all.pt"], check=True)


def test_an_unfinished_calibration_begins_anew_after_loading():
    config = {"retrain_data_config": {"batch_num": 2}}
    torch.manual_seed(0)
    module, loaded = amct.LinearQAT(5, 7, config=config), amct.LinearQAT(5, 7, config=config)
    x = torch.randn(50, 5)
    module(x * 100)
    twin = copy.deepcopy(module)
    loaded.load_state_dict(module.state_dict())
    for each in (loaded, twin):
        each(x)
    assert (int(loaded.cur_batch), int(twin.cur_batch), int(module.cur_batch)) == (1, 2, 1)
    loaded(x)
    assert loaded.acts_clip_max.item() < 10 < twin.acts_clip_max.item()


def test_the_state_of_a_float_module_loads_and_scales_start_anew():
    module, inputs = trained("Conv2dQAT", LEARNED)
    float_state = {"weight": module.weight.detach() * 4, "bias": module.bias.detach()}
    before = module.wts_scales.detach().clone()
    module.load_state_dict(float_state, strict=False)
    module(*inputs)
    assert (module.wts_scales > 2 * before).all()


# -- from a float module -----------------------------------------------------------------------------------------------

FLOAT = {
    "Conv1dQAT": lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1),
    "Conv2dQAT": lambda: nn.Conv2d(4, 6, 3, padding="same", groups=2, dilation=2),
    "Conv3dQAT": lambda: nn.Conv3d(2, 4, 3, bias=False),
    "ConvTranspose1dQAT": lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1),
    "ConvTranspose2dQAT": lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, padding=1, groups=2),
    "LinearQAT": lambda: nn.Linear(5, 7),
    "LSTMQAT": lambda: nn.LSTM(4, 5, batch_first=True),
    "GRUQAT": lambda: nn.GRU(4, 5, bias=False),
}


@pytest.mark.parametrize("name", FLOAT)
def test_from_float_shares_the_parameters(name):
    plain, inputs = FLOAT[name]().eval(), inputs_of(name)
    module = getattr(amct, name).from_float(plain, config={"retrain_enable": False})
    assert not module.training
    assert all(getattr(module, key) is value for key, value in plain.named_parameters())
    assert torch.equal(main_output(module(*inputs)), main_output(plain(*inputs)))
    quantized = getattr(amct, name).from_float(plain)
    quantized(*inputs)
    output, wanted = main_output(quantized(*inputs)), main_output(plain(*inputs))
    assert output.shape == wanted.shape
    assert 0 < (output - wanted).norm() < 0.05 * wanted.norm()
    output.sum().backward()
    assert all(value.grad is not None for value in plain.parameters())


def test_matmul_from_float():
    class MatMul(nn.Module):
        def forward(self, a, b):
            return a @ b

    assert isinstance(amct.MatMulQAT.from_float(MatMul()), amct.MatMulQAT)


@pytest.mark.parametrize("name", MODULES)
def test_from_float_of_another_module(name):
    for error in (TypeError, RuntimeError):
        with pytest.raises(error, match=r"from_float: mod must be a .*, got BatchNorm2d"):
            getattr(amct, name).from_float(nn.BatchNorm2d(3))


def test_from_float_tells_what_it_cannot_do():
    with pytest.raises(TypeError, match="got Conv2dQAT"):
        amct.Conv2dQAT.from_float(MODULES["Conv2dQAT"]())
    with pytest.raises(RuntimeError, match='padding_mode is "circular"'):
        amct.Conv2dQAT.from_float(nn.Conv2d(4, 6, 3, padding_mode="circular"))
    with pytest.raises(RuntimeError, match="weight is computed from other parameters"):
        amct.LinearQAT.from_float(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))


# -- mistakes ----------------------------------------------------------------------------------------------------------

CONFIGS = {
    "clip_max type": ({"retrain_data_config": {"clip_max": 6, "clip_min": -6.0}}, TypeError, "with a decimal point"),
    "clip_max sign": ({"retrain_data_config": {"clip_max": -6.0, "clip_min": -6.0}}, ValueError, "greater than 0"),
    "clip_min sign": ({"retrain_data_config": {"clip_max": 6.0, "clip_min": 6.0}}, ValueError, "less than 0"),
    "clip_min alone": ({"retrain_data_config": {"clip_min": -6.0}}, ValueError, "clip_min needs clip_max"),
    "batch_num": ({"retrain_data_config": {"batch_num": 0}}, ValueError, "batch_num must be at least 1, got 0"),
    "batch_num type": ({"retrain_data_config": {"batch_num": 1.5}}, TypeError, "must be an integer, got 1.5"),
    "fixed_min": ({"retrain_data_config": {"fixed_min": 1}}, TypeError, "must be true or false, got 1"),
    "data type": ({"retrain_data_config": {"dst_type": "INT4"}}, ValueError, "dst_type must be 'INT8' or 'INT16'"),
    "weight type": ({"retrain_weight_config": {"dst_type": "INT4"}}, ValueError, "dst_type must be 'INT8'"),
    "algorithm": (
        {"retrain_weight_config": {"weights_retrain_algo": "ada"}},
        ValueError,
        "must be 'arq_retrain' or 'ulq_retrain'",
    ),
    "channel_wise": ({"retrain_weight_config": {"channel_wise": "yes"}}, TypeError, "must be true or false"),
    "two names": (
        {"retrain_weight_config": {"weights_retrain_algo": "arq_retrain", "weight_retrain_algo": "ulq_retrain"}},
        ValueError,
        "contradict each other",
    ),
    "unknown key": ({"retrain_weights_config": {}}, ValueError, 'Did you mean "retrain_weight_config"'),
    "unknown inner key": ({"retrain_data_config": {"clip": 1.0}}, ValueError, 'key "retrain_data_config.clip" is unkn'),
    "block type": ({"retrain_data_config": []}, TypeError, "retrain_data_config must be a dict"),
    "enable type": ({"retrain_enable": 1}, TypeError, "retrain_enable must be true or false, got 1"),
    "config type": ([], TypeError, "Conv2dQAT: config must be a dict or None, got list"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_mistake_in_a_config(name):
    config, error, message = CONFIGS[name]
    with pytest.raises(error, match=message) as caught:
        amct.Conv2dQAT(4, 6, 3, config=config)
    assert str(caught.value).startswith("Conv2dQAT: ")


def test_both_names_of_the_algorithm_are_accepted():
    for key in ("weights_retrain_algo", "weight_retrain_algo"):
        assert amct.Conv2dQAT(4, 6, 3, config={"retrain_weight_config": {key: "ulq_retrain"}}).wts_scales.requires_grad


def test_a_linear_module_has_one_scale():
    assert amct.LinearQAT(5, 7).wts_scales.shape == (1,)
    with pytest.raises(RuntimeError, match=r"LinearQAT: retrain_weight_config.channel_wise must be False"):
        amct.LinearQAT(5, 7, config={"retrain_weight_config": {"channel_wise": True}})


SETTINGS = {
    "padding_mode": (lambda: amct.Conv2dQAT(4, 6, 3, padding_mode="reflect"), 'padding_mode is "reflect"'),
    "dilation": (lambda: amct.Conv3dQAT(4, 6, 3, dilation=2), "the first must be 1"),
    "axes of dilation": (
        lambda: amct.Conv3dQAT(1, 1, 1, dilation=(1, 1)),
        r"dilation must be one number or 3, .*\(1, 1\)",
    ),
    "axes of stride": (lambda: amct.ConvTranspose1dQAT(1, 1, 1, stride=(1, 1)), "stride must be one number or 1"),
    "layers": (lambda: amct.LSTMQAT(4, 5, 2), "it has 2 layers"),
    "directions": (lambda: amct.GRUQAT(4, 5, bidirectional=True), "it is bidirectional"),
    "projection": (lambda: amct.LSTMQAT(4, 5, proj_size=2), "proj_size is 2"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_cannot_be_quantized(name):
    make, message = SETTINGS[name]
    for error in (RuntimeError, ValueError):
        with pytest.raises(error, match=message):
            make()


def test_mistakes_in_the_input():
    module = MODULES["Conv2dQAT"]()
    with pytest.raises(RuntimeError, match=r"must have 4 dimensions \(batch, channels.*got the shape \[4, 7, 7\]"):
        module(torch.randn(4, 7, 7))
    with pytest.raises(TypeError, match=r"got a tensor of torch\.int64"):
        module(torch.ones(1, 4, 7, 7, dtype=torch.int64))
    with pytest.raises(TypeError, match="got list"):
        module([1.0])
    with pytest.raises(CalibrationError, match="Conv2dQAT, batch 1: the activation holds 1 NaN"):
        module(torch.full((1, 4, 7, 7), 1.0).index_fill(1, torch.tensor([0]), torch.nan)[..., :1, :1])
    with pytest.raises(ValueError, match="time, batch, features"):
        MODULES["LSTMQAT"]()(torch.randn(4, 4))


@pytest.mark.parametrize("axes", [1, 7])
def test_a_product_takes_operands_of_two_to_six_dimensions(axes):
    operand = torch.rand([3] * axes)
    with pytest.raises(RuntimeError, match="MatMulQAT: operands must have 2 to 6 dimensions, got"):
        amct.MatMulQAT()(operand, operand)
    assert amct.MatMulQAT()(torch.rand(2, 2), torch.rand([2] * 6)).dim() == 6
    with pytest.raises(TypeError, match="MatMulQAT: device must be str"):
        amct.MatMulQAT(device=3)


@pytest.mark.parametrize("name", MODULES)
def test_a_model_with_such_a_module_is_not_quantized_again(name):
    with pytest.raises(ModelError, match=f"already contains 1 AMCT operators: .*{name}"):
        quantize(nn.Sequential(MODULES[name]()), torch.randn(2, 4, 7, 7))


# -- ONNX --------------------------------------------------------------------------------------------------------------


CONFIGS_OF_EXPORT = {
    "Conv1dQAT": INT16,
    "Conv2dQAT": LEARNED,
    "Conv3dQAT": PER_TENSOR,
    "GRUQAT": PER_TENSOR,
    "MatMulQAT": {"retrain_data_config": {"clip_max": 2.0, "fixed_min": True}},
}
EXPORTED = [*((name, None) for name in MODULES), *CONFIGS_OF_EXPORT.items()]


class All(nn.Module):
    """Every kind of module, each with inputs of its own, so that one export shows them all."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(trained(name, config, steps=1)[0] for name, config in EXPORTED)

    def forward(self, given):
        return tuple(main_output(part(*each)) for part, each in zip(self.parts, given, strict=True))


def exported(module, arguments, **options):
    with quiet_exporters():
        return torch.onnx.export(module, arguments, dynamo=True, verbose=False, **options).model_proto


def test_the_exported_file_computes_what_the_module_computes():
    model, given = All().eval(), [inputs_of(name) for name, _ in EXPORTED]
    with torch.no_grad():
        wanted = model(given)
    file = exported(model, (given,))
    onnx.checker.check_model(file)
    kinds = [node.op_type for node in file.graph.node]
    # each module has an input and a weight; a recurrent one a state and two weights, MatMul two inputs
    pairs = sum({"LSTMQAT": 4, "GRUQAT": 4}.get(name, 2) for name, _ in EXPORTED)
    assert kinds.count("QuantizeLinear") == kinds.count("DequantizeLinear") == pairs
    assert (kinds.count("LSTM"), kinds.count("GRU")) == (1, 2)
    session = onnxruntime.InferenceSession(file.SerializeToString())
    tensors = torch.utils._pytree.tree_leaves(given)
    names = [each.name for each in session.get_inputs()]
    found = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)})
    for which, ours, theirs in zip(EXPORTED, wanted, found, strict=True):
        # Integers are equal but for ties; sums of float32 products differ in their order.
        assert np.abs(theirs - ours.numpy()).max() <= 1e-5 * np.abs(theirs).max(), which


def test_a_file_with_a_dynamic_batch_runs_with_integers():
    module, (x,) = trained("Conv2dQAT")
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    file = exported(module.eval(), (x,), dynamic_shapes=shapes)
    assert [node.op_type for node in file.graph.node] == [*["QuantizeLinear", "DequantizeLinear"] * 2, "Conv"]
    axes = [attribute.i for attribute in file.graph.node[2].attribute if attribute.name == "axis"]
    assert axes == [0]
    session = onnxruntime.InferenceSession(file.SerializeToString())
    more = torch.randn(5, 4, 7, 7)
    (found,) = session.run(None, {session.get_inputs()[0].name: more.numpy()})
    with torch.no_grad():
        assert np.abs(found - module(more).numpy()).max() < 1e-5


def test_an_export_without_clips_is_refused():
    module = amct.LinearQAT(5, 7, config={"retrain_data_config": {"batch_num": 3}})
    module(torch.randn(2, 5))
    with pytest.raises(Exception, match="run 2 more batches before the export") as caught:
        exported(module.eval(), (torch.randn(2, 5),))
    assert any(isinstance(error, ExportError) for error in causes(caught.value))
    close_torchs_log_files()


def close_torchs_log_files():
    """Torch 2.8 leaves a log of its own open behind an export that fails, of which Python warns in some later test."""
    handlers = [reference() for reference in logging._handlerList]
    for handler in handlers:
        if isinstance(handler, torch._logging._internal.LazyTraceHandler) and handler.stream is not None:
            handler.close()


def causes(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
