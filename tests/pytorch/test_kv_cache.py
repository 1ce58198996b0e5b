"""Calibration of key/value caches: AMCT's factors on its goldens, a decoding loop, two models at once, mistakes."""

from __future__ import annotations

import copy
import gc
import io
import json
import logging
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from ptq_goldens import AMCT
from pytorch_nets import Attention
from torch import nn
from torch.nn import functional

import amct_pytorch as amct
from amct.calibration.record_files import progress_path
from amct.errors import CalibrationError, ConfigError
from amct.record import read_record

ONE_ROUNDING = 1e-5
"""Both compute in float32, in different order: six digits agree."""
CASES = ("kv_default", "kv_hfmg_pt", "kv_ifmr_pc")
LAYERS = {"kv_cache_quant_layers": ["k", "v"]}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def golden():
    with np.load(AMCT / "kv_net.npz") as archive:
        found = {name: torch.from_numpy(archive[name]) for name in archive.files}
    model = Attention()
    model.load_state_dict({name.removeprefix("weights/"): value for name, value in found.items() if "weights/" in name})
    return model.eval(), [found["inputs/b0"], found["inputs/b1"]]


def check_entry(ours, theirs):
    assert len(ours.scale) == len(theirs.scale)
    assert max(abs(a / b - 1) for a, b in zip(ours.scale, theirs.scale, strict=True)) <= ONE_ROUNDING
    assert ours.offset == theirs.offset


@pytest.mark.parametrize("case", CASES)
def test_config_and_factors_are_those_of_the_reference(case, tmp_path):
    model, batches = golden()
    simple = tmp_path / "quant.cfg"
    if (AMCT / case / "quant.cfg").exists():
        simple.write_bytes((AMCT / case / "quant.cfg").read_bytes())
        amct.create_quant_cali_config("config.json", model, config_defination=str(simple))
    else:
        amct.create_quant_cali_config("config.json", model, quant_layers=LAYERS)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == json.loads((AMCT / case / "config.json").read_text())
    model = amct.create_quant_cali_model("config.json", "record.txt", model)
    for batch in batches[: config["batch_num"]]:
        model(batch)
    record, theirs = read_record("record.txt"), read_record(AMCT / case / "record.txt")
    assert record.names == theirs.names
    for name, entry in theirs.kv_cache.items():
        check_entry(record.kv_cache[name], entry)


GOLDEN_PARAMETERS = {
    "kv_default": {},
    "kv_hfmg_pt": {"batch_num": 2, "act_algo": "hfmg", "asymmetric": False},
    "kv_ifmr_pc": {"batch_num": 2, "quant_granularity": "per_channel"},
}


@pytest.mark.parametrize("case", CASES)
def test_the_module_placed_by_hand_gives_the_factors_of_the_reference(case):
    model, batches = golden()
    calibrate = amct.QuantCalibrationOp("record.txt", GOLDEN_PARAMETERS[case])
    for batch in batches:
        keys = model.k(batch)
        assert calibrate("k", keys) is keys
    check_entry(read_record("record.txt").kv_cache["k"], read_record(AMCT / case / "record.txt").kv_cache["k"])


# -- a decoder with a cache --------------------------------------------------------------------------------------------


def as_it_is(_, x):
    return x


class Block(nn.Module):
    """A pre-norm transformer block that attends to the keys and values in its cache."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(24), nn.LayerNorm(24)
        self.query, self.key, self.value, self.out = (nn.Linear(24, 24) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))

    def forward(self, x, name, cache, stored):
        normed = self.norm(x)
        for part in ("key", "value"):
            each = f"{name}.{part}"
            cache.setdefault(each, []).append(stored(each, getattr(self, part)(normed)))
        keys, values = (torch.cat(cache[f"{name}.{part}"], 1) for part in ("key", "value"))
        heads = [tensor.unflatten(2, (3, 8)).transpose(1, 2) for tensor in (self.query(normed), keys, values)]
        x = x + self.out(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class CachedDecoder(nn.Module):
    """A small transformer that decodes one token at a time from a cache of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 24), nn.Linear(24, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, token, cache, stored=as_it_is):
        x = self.embed(token)[:, None]
        for number, block in enumerate(self.blocks):
            x = block(x, f"blocks.{number}", cache, stored)
        return self.head(x)[:, 0]


CACHED = [f"blocks.{number}.{part}" for number in range(2) for part in ("key", "value")]


def decode(model, steps, stored=as_it_is):
    """The logits of 8 texts, token by token with one cache; the texts are given, so that a near tie has no effect."""
    texts, cache = torch.randint(0, 16, (steps, 8), generator=torch.Generator().manual_seed(2)), {}
    return torch.stack([model(tokens, cache, stored) for tokens in texts])


def rounded(x, entry):
    """float64: the values of a cache entry after 8 bits."""
    scale, offset = torch.tensor(entry.scale, dtype=torch.float64), torch.tensor(entry.offset)
    return ((x.double() / scale).round() + offset).clamp(-128, 127).sub(offset).mul(scale).float()


@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel"])
@pytest.mark.parametrize("algorithm", ["ifmr", "hfmg"])
def test_a_decoding_loop_is_calibrated_step_by_step(algorithm, granularity, tmp_path):
    torch.manual_seed(0)
    model = CachedDecoder().eval()
    before = decode(model, 12)
    layers = " ".join(f"quant_layers: '{name}'" for name in CACHED)
    (tmp_path / "kv.cfg").write_text(
        f"batch_num: 12 kv_cache_quant_config {{ {layers} "
        f"calibration_config {{ {algorithm}_quantize {{ quant_granularity: {granularity} }} }} }}"
    )
    amct.create_quant_cali_config("config.json", model, config_defination="kv.cfg")
    calibrating = amct.create_quant_cali_model("config.json", "record.txt", model)
    seen = {name: [] for name in CACHED}
    assert torch.equal(decode(calibrating, 12, lambda name, x: seen[name].append(x.detach()) or x), before)
    entries = read_record("record.txt").kv_cache
    assert list(entries) == CACHED
    for name, entry in entries.items():
        values = torch.cat(seen[name])
        assert len(entry.scale) == len(entry.offset) == (24 if granularity == "per_channel" else 1)
        # What is not clipped is wrong by half a step at most; IFMR and HFMG clip few values, by a part of the range.
        error = (rounded(values, entry) - values).abs()
        assert (error <= torch.tensor(entry.scale) * 0.501).double().mean() > 0.95
        assert error.max() < 0.5 * values.abs().max()
    after = decode(model, 12, lambda name, x: rounded(x, entries[name]))
    assert (after - before).norm() < 0.05 * before.norm()


def test_the_model_is_as_before_when_calibration_has_ended():
    model, batches = golden()
    state, expected = copy.deepcopy(model.state_dict()), model(batches[0])
    calibrating = calibration_of(model, 2)
    assert calibrating is model
    output = calibrating(batches[0])
    assert torch.equal(output, expected)
    assert output.requires_grad  # gradients are the user's business
    assert list(model.state_dict()) == list(state)
    model(batches[1])
    assert "forward" not in vars(model)
    assert not any(module._forward_hooks for module in model.modules())
    text = Path("record.txt").read_text()
    model(batches[1] * 100)
    assert Path("record.txt").read_text() == text


def calibration_of(model, batch_num, name="record.txt", layers=("k", "v")):
    config = {"batch_num": batch_num, **{layer: {"kv_data_quant_config": {}} for layer in layers}}
    Path(f"{name}.json").write_text(json.dumps(config))
    return amct.create_quant_cali_model(f"{name}.json", name, model)


def test_two_models_at_once_in_two_threads():
    def alone(scale):
        model, batches = golden()
        calibration_of(model, 2, f"alone{scale}.txt")
        for batch in batches:
            model(batch * scale)
        return read_record(f"alone{scale}.txt")

    expected = [alone(1), alone(3)]
    pairs = [golden(), golden()]
    for index, (model, _) in enumerate(pairs):
        calibration_of(model, 2, f"record{index}.txt")

    def run(index, scale):
        model, batches = pairs[index]
        for batch in batches:
            model(batch * scale)

    threads = [threading.Thread(target=run, args=pair) for pair in ((0, 1), (1, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [read_record("record0.txt"), read_record("record1.txt")] == expected
    assert expected[0] != expected[1]


def test_two_calibrations_of_one_model_at_once():
    model, batches = golden()
    calibration_of(model, 1, "first.txt", ["k"])
    calibration_of(model, 2, "second.txt", ["k", "v"])
    for batch in batches:
        model(batch)
    assert read_record("first.txt").names == ("k",)
    assert read_record("second.txt").names == ("k", "v")
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(model(batches[0]), golden()[0](batches[0]))


def test_copies_of_a_model_do_not_take_part():
    model, batches = golden()
    calibration_of(model, 2)
    model(batches[0])
    twin = copy.deepcopy(model)
    for batch in batches * 2:
        twin(batch)
    assert read_record("record.txt").is_empty
    model(batches[1])
    assert not read_record("record.txt").is_empty


def test_a_module_that_is_called_without_its_model_counts_its_own_calls():
    model, batches = golden()
    calibration_of(model, 2, layers=["k"])
    for batch in batches:
        model.k(batch)
    assert read_record("record.txt").names == ("k",)


def test_an_incomplete_calibration_is_told_when_the_model_is_gone(caplog):
    model, batches = golden()
    calibration_of(model, 3)
    model(batches[0])
    assert json.loads(progress_path("record.txt").read_text())["layers"] == {"k": [1, 3], "v": [1, 3]}
    assert read_record("record.txt").is_empty
    with caplog.at_level(logging.WARNING):
        del model
        gc.collect()
    assert "record.txt: the calibration of the key/value cache is incomplete: calibrated 0 of 2 layers; 2 more" in (
        caplog.text
    )


def test_an_incomplete_calibration_of_the_module_is_told_when_it_is_gone(caplog):
    calibrate = amct.QuantCalibrationOp("record.txt", {"batch_num": 3})
    calibrate("layer0.key", torch.ones(2, 3))
    with caplog.at_level(logging.WARNING):
        del calibrate
        gc.collect()
    assert "record.txt: the calibration of the key/value cache is incomplete" in caplog.text
    assert '2 more batches needed for "layer0.key"' in caplog.text


def test_broken_data_names_layer_and_batch_and_the_batch_can_be_repeated():
    model, batches = golden()
    calibration_of(model, 2, layers=["k"])
    model(batches[0])
    with pytest.raises(CalibrationError, match=r'layer "k", output, batch 2: the activation holds 16 NaN'):
        model(torch.full_like(batches[0][:, :1], torch.nan))
    model(batches[1])
    check_entry(
        read_record("record.txt").kv_cache["k"],
        run_alone(batches),
    )


def run_alone(batches):
    model, _ = golden()
    calibration_of(model, 2, "alone.txt", ["k"])
    for batch in batches:
        model(batch)
    return read_record("alone.txt").kv_cache["k"]


# -- the module placed by hand -----------------------------------------------------------------------------------------


def test_modules_with_one_record_write_beside_each_other():
    first, second = amct.QuantCalibrationOp("record.txt"), amct.QuantCalibrationOp("record.txt", {"batch_num": 2})
    first("a", torch.randn(4, 3))
    for _ in range(2):
        second("b", torch.randn(4, 3).half())
    first("c", torch.randn(2, 2, 3))
    assert read_record("record.txt").names == ("a", "b", "c")
    amct.QuantCalibrationOp("record.txt")
    assert read_record("record.txt").is_empty


def test_copies_and_pickles_of_the_module():
    calibrate = amct.QuantCalibrationOp("record.txt", {"quant_granularity": "per_channel"})
    assert not calibrate.state_dict()
    x = torch.randn(4, 3)
    copy.deepcopy(calibrate)("a", x)
    assert read_record("record.txt").is_empty
    file = io.BytesIO()
    torch.save(calibrate, file)
    file.seek(0)
    torch.load(file, weights_only=False)("b", x)
    assert len(read_record("record.txt").kv_cache["b"].scale) == 3


def test_a_model_with_the_module_can_be_exported():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calibrate = amct.QuantCalibrationOp("record.txt")

        def forward(self, x):
            return self.calibrate("x", x) * 2

    program = torch.export.export(Model(), (torch.ones(2, 3),))
    assert read_record("record.txt").is_empty
    assert torch.equal(program.module()(torch.ones(2, 3)), torch.full((2, 3), 2.0))


PARAMETERS = {
    "unknown": ({"num_bits": 8}, RuntimeError, 'the key "num_bits" is unknown'),
    "near": ({"batchnum": 1}, RuntimeError, 'Did you mean "batch_num"'),
    "mixed": ({"act_algo": "hfmg", "search_step": 0.1}, RuntimeError, "belongs to ifmr, but act_algo is hfmg"),
    "algorithm": ({"act_algo": "kl"}, RuntimeError, "act_algo must be 'ifmr' or 'hfmg'"),
    "granularity": ({"quant_granularity": "per_row"}, RuntimeError, "quant_granularity must be 'per_tensor'"),
    "batch_num": ({"batch_num": 0}, RuntimeError, "batch_num must be at least 1, got 0"),
    "percentile": ({"max_percentile": 0.4}, RuntimeError, "max_percentile must be at least 0.5"),
    "range": ({"search_range": [1.3, 0.7]}, RuntimeError, "search_range needs 0 < start < end"),
    "range type": ({"search_range": 1.0}, (TypeError, RuntimeError), "search_range must be a list of two numbers"),
    "algorithm type": ({"act_algo": 1}, (TypeError, RuntimeError), "act_algo must be 'ifmr' or 'hfmg', got 1"),
    "step": ({"search_step": 0.0}, RuntimeError, "search_step must be greater than 0"),
    "bins": ({"act_algo": "hfmg", "num_of_bins": 5}, RuntimeError, "num_of_bins must be 1024"),
    "asymmetric": ({"asymmetric": 1}, TypeError, "asymmetric must be true or false, got 1"),
    "batch_num type": ({"batch_num": "2"}, TypeError, "batch_num must be an integer"),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_mistake_in_the_parameters_of_the_module(name):
    parameters, error, message = PARAMETERS[name]
    for each in error if isinstance(error, tuple) else (error,):
        with pytest.raises(each, match=message):
            amct.QuantCalibrationOp("record.txt", parameters)


def test_a_percentile_of_the_module_may_be_one_half():
    """That of a config may not: AMCT's bounds differ."""
    calibrate = amct.QuantCalibrationOp("record.txt", {"max_percentile": 0.5, "min_percentile": 0.5})
    calibrate("a", torch.linspace(-1, 1, 100))
    assert read_record("record.txt").kv_cache["a"].scale[0] < 2 / 255


def test_mistakes_in_the_arguments_of_the_module():
    with pytest.raises(TypeError, match="record_file must be str"):
        amct.QuantCalibrationOp(3)
    with pytest.raises(TypeError, match="quant_algo_params must be dict or None, got list"):
        amct.QuantCalibrationOp("record.txt", [])
    with pytest.raises(RuntimeError, match='quant_method must be "kv_cache_quant", got "x"'):
        amct.QuantCalibrationOp("record.txt", None, "x")
    calibrate = amct.QuantCalibrationOp("record.txt", {"batch_num": 2})
    with pytest.raises(TypeError, match="layer_name must be str, got int"):
        calibrate(1, torch.ones(2))
    with pytest.raises(TypeError, match="tensor must be"):
        calibrate("a", [1.0])
    with pytest.raises(RuntimeError, match=r'layer "a", output, batch 1.*1 NaN'):
        calibrate("a", torch.tensor([1.0, torch.nan]))


# -- mistakes in the functions -----------------------------------------------------------------------------------------

ARGUMENTS = {
    "unknown layer (row 58)": ({"kv_cache_quant_layers": ["nope"]}, ValueError, 'the layer "nope" is unknown'),
    "unknown key (row 59)": ({"kv_layers": ["k"]}, TypeError, 'the key "kv_layers" is unknown'),
    "repeated": ({"kv_cache_quant_layers": ["k", "k"]}, ValueError, '"k" is repeated'),
    "not Linear": ({"kv_cache_quant_layers": ["ln"]}, ValueError, "of type LayerNorm, which cannot be"),
    "no layer": ({"kv_cache_quant_layers": []}, RuntimeError, "no layer is named"),
    "nothing": (None, RuntimeError, "no layer is named"),
    "a string": ({"kv_cache_quant_layers": "k"}, TypeError, "must be a list of layer names, got 'k'"),
    "a list": (["k"], TypeError, "quant_layers must be dict or None, got list"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_mistake_in_quant_layers(name, tmp_path):
    quant_layers, error, message = ARGUMENTS[name]
    with pytest.raises(error, match=message):
        amct.create_quant_cali_config("config.json", Attention(), quant_layers)
    assert not (tmp_path / "config.json").exists()


def test_mistakes_in_files_and_models(tmp_path):
    model = Attention()
    with pytest.raises(RuntimeError, match="config_defination") as caught:
        amct.create_quant_cali_config("config.json", model, config_defination="nowhere.cfg")
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(OSError, match=r"nowhere\.json"):
        amct.create_quant_cali_model("nowhere.json", "record.txt", model)
    (tmp_path / "config.json").write_text('{"kk": {"kv_data_quant_config": {}}}')
    with pytest.raises(ConfigError, match=r'config.json:1:2: the layer or global field "kk" is unknown'):
        amct.create_quant_cali_model("config.json", "record.txt", model)
    assert not (tmp_path / "record.txt").exists()
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(TypeError, match="model must be torch"):
        amct.create_quant_cali_config("config.json", None, LAYERS)


def test_a_layer_whose_output_is_no_tensor_is_told():
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), None

    model = nn.Sequential(Pair(3, 3))
    calibration_of(model, 1, layers=["0"])
    with pytest.raises(CalibrationError, match='layer "0": the output is a tuple, expected a tensor; call a Quant'):
        model(torch.ones(2, 3))


def test_wrapped_models_are_unwrapped():
    model, batches = golden()
    assert calibration_of(nn.DataParallel(model), 1) is model
    model(batches[0])
    assert read_record("record.txt").names == ("k", "v")
