"""Models with unusual forwards, weights, names and outputs: quantized, saved and run, or refused with a reason."""

from __future__ import annotations

import logging
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx
import pytest
import torch
from ptq_helpers import Flow, run_onnx
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import amct.pytorch as amct
from amct.errors import ConfigError, ExportError, ModelError

if TYPE_CHECKING:
    import numpy as np


class Net(nn.Module):
    """A convolution ``c`` and a linear layer ``l``, called as ``how`` does it."""

    def __init__(self, how, **modules: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.c = nn.Conv2d(3, 4, 3)
        self.l = nn.Linear(4, 2)
        self.how = how
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.how(self, x)


def image() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def head(net: Net, y: torch.Tensor) -> torch.Tensor:
    return net.l(y.mean((2, 3)))


def tensors(result: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def sqnr(signal: np.ndarray, other: np.ndarray) -> float:
    noise = float(((signal - other) ** 2).sum())
    return math.inf if noise == 0 else 10 * math.log10(float((signal**2).sum()) / noise)


def assert_quantized(model: nn.Module, layers: list[str], folder, data: torch.Tensor | None = None) -> None:
    """Quantize these layers and run the files; 8 bits at three sigma have a noise of about -40 dB, so 25 is wrong."""
    data = image() if data is None else data
    with torch.no_grad():
        expected = [tensor.numpy() for tensor in tensors(model.eval()(data))]
    quantized = amct.quantize(model, [data])
    assert list(quantized.record.layers) == layers
    for file in quantized.save(folder / "net", formats=("qdq", "fake_quant"))[:2]:
        found = run_onnx(file, model, data)
        assert [array.shape for array in found] == [array.shape for array in expected]
        for one, other in zip(expected, found, strict=True):
            assert sqnr(one, other) > 25


# -- outputs -----------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    scores: torch.Tensor
    count: int


def test_numbers_and_texts_among_the_outputs_are_left_out(tmp_path):
    model = Net(lambda s, x: {"y": head(s, s.c(x)), "count": 3, "size": x.shape[0], "kind": "cls", "none": None})
    assert_quantized(model, ["c", "l"], tmp_path)


def test_the_tensors_of_a_data_class_are_outputs(tmp_path):
    quantized = amct.quantize(Net(lambda s, x: Result(head(s, s.c(x)), 1)), [image()])
    (file, _) = quantized.save(tmp_path / "net", formats=("qdq",))
    assert run_onnx(file, Net(None), image())[0].shape == (2, 2)


class Cache:
    """Holds tensors where torch does not find them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Config:
    use_cache = True


@pytest.mark.parametrize(("config", "remedy"), [(None, "return tensors, or tuples"), (Config(), "use_cache=False")])
def test_an_unknown_object_among_the_outputs_is_named_with_the_remedy(tmp_path, config, remedy):
    model = Net(lambda s, x: (head(s, y := s.c(x)), Cache(y)))
    model.config = config
    quantized = amct.quantize(model, [image()])
    assert list(quantized.record.layers) == ["c", "l"]
    with pytest.raises(ExportError, match=f"returns an object of class Cache; .*{remedy}"):
        quantized.save(tmp_path / "net", formats=("qdq",))


# -- operations with graphs of their own -------------------------------------------------------------------------------


def autocast(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net.c(x)
    return head(net, y.float())


def with_gradients(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = net.c(x)
    with torch.no_grad():
        return head(net, y)


def condition(net: Net, x: torch.Tensor) -> torch.Tensor:
    return head(net, torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (net.c(x),)))


def recomputed(net: Net, x: torch.Tensor) -> torch.Tensor:
    return head(net, checkpoint(net.c, x, use_reentrant=False))


@pytest.mark.parametrize("how", [autocast, with_gradients, condition, recomputed])
def test_layers_in_regions_and_beside_conditions_are_quantized(how, tmp_path):
    assert_quantized(Net(how), ["c", "l"], tmp_path)


def test_layers_in_the_branches_of_a_condition_stay_float_with_the_reason(tmp_path):
    def branches(net, x):
        return head(net, torch.cond(x.sum() > 0, lambda y: net.a(y), lambda y: net.b(y), (net.c(x),)))

    model = Net(branches, a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 4, 1))
    assert_quantized(model, ["c", "l"], tmp_path)
    skipped = {skip.layer: skip.reason for skip in amct.quantize(model, [image()]).skipped}
    assert "called inside cond" in skipped["a"]
    assert "called inside cond" in skipped["b"]


def test_a_condition_that_torch_cannot_capture_is_calibrated():
    model = Net(lambda s, x: torch.cond(x.sum() > 0, lambda y: s.c(y) + 1, lambda y: s.c(y) - 1, (x,)))
    if can_be_exported(model):  # as torch 2.7 and 2.15 can, but not those between
        with pytest.raises(ConfigError, match="called inside cond"):
            amct.quantize(model, [image()])
    else:
        assert list(amct.quantize(model, [image()]).record.layers) == ["c"]


def can_be_exported(model):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.export(model, (image(),), strict=False)
    except Exception:  # noqa: BLE001  torch's releases differ in which
        return False
    return True


def centred(y: torch.Tensor) -> torch.Tensor:
    """Each picture and channel less its own mean, by functions of one picture and of one channel."""
    of_channel = torch.vmap(lambda channel: channel - channel.mean(), in_dims=0, out_dims=0)
    return torch.vmap(of_channel)(y)


def test_a_function_mapped_by_vmap_is_captured_and_vmap_stays_as_it_was(tmp_path):
    assert_quantized(Net(lambda s, x: head(s, centred(s.c(x)).abs())), ["c", "l"], tmp_path)
    y = torch.randn(2, 3, 4, 4)
    assert torch.allclose(centred(y), y - y.mean((2, 3), keepdim=True), atol=1e-6)
    recorded = make_fx(centred)(y)  # torch's own recorder, without a capture of ours
    assert torch.allclose(recorded(2 * y), centred(2 * y), atol=1e-6)


def test_an_attention_mask_made_by_vmap_in_a_program_is_an_ordinary_operation(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=20, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    quantized = amct.quantize(model, [{"input_ids": torch.arange(8).reshape(1, 8)}])
    assert len(quantized.record.layers) == 8
    assert (tmp_path / "net_qdq_model.onnx") in quantized.save(tmp_path / "net", formats=("qdq",))


# -- weights that torch computes ---------------------------------------------------------------------------------------


def masked(layer: nn.Linear) -> nn.Linear:
    prune.l1_unstructured(layer, "weight", 0.3)
    return layer


COMPUTED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "weight_norm by hooks": pytest.param(
        nn.utils.weight_norm, marks=pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
    ),
    "spectral_norm by hooks": nn.utils.spectral_norm,
    "pruning mask": masked,
}


@pytest.mark.parametrize("computed", COMPUTED.values(), ids=COMPUTED)
@pytest.mark.parametrize("depends_on_data", [False, True], ids=["captured", "watched"])
def test_computed_weights_are_quantized_by_their_values_and_stay_computed(computed, depends_on_data, tmp_path):
    def how(net, x):
        y = net.c(x)
        return head(net, y + 1 if depends_on_data and y.sum() > -1e9 else y)

    model = Net(how)
    model.l = computed(nn.Linear(4, 2))
    model.eval()
    with torch.no_grad():
        before = model(image())
    if depends_on_data:
        quantized = amct.quantize(model, [image()])
        assert list(quantized.record.layers) == ["c", "l"]
        assert sqnr(before.numpy(), quantized(image()).numpy()) > 25
    else:
        assert_quantized(model, ["c", "l"], tmp_path)
    with torch.no_grad():
        assert torch.equal(model(image()), before)  # the user's model still computes its weight


# -- names and settings ------------------------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({name: nn.Conv2d(3, 3, 3, padding=1) for name in names})

    def forward(self, x):
        for layer in self.layers.values():
            x = torch.relu(layer(x))
        return x


ODD = ('say "hi"', "it's", "back\\slash", "two\nlines", "a/b", "λ ünï", "[0]")


def test_module_names_may_have_quotes_and_other_signs(tmp_path):
    assert_quantized(Named(*ODD), [f"layers.{name}" for name in ODD], tmp_path)


def test_module_names_with_quotes_pass_through_the_files_of_the_four_functions(tmp_path):
    flow = Flow(tmp_path, Named(*ODD), image()).configure()
    flow.quantize()(image())
    flow.save()
    assert run_onnx(tmp_path / "out" / "q_fake_quant_model.onnx", flow.model, image())[0].shape == (2, 3, 8, 8)


def test_a_module_name_with_a_dot_is_refused():
    model = Net(lambda s, x: head(s, s.c(x)))
    model._modules["a.b"] = nn.ReLU()
    with pytest.raises(ModelError, match=r'the name of module "a\.b" in Net contains a dot'):
        amct.quantize(model, [image()])


def test_circular_padding_of_zero_is_saved(tmp_path):
    assert_quantized(
        nn.Sequential(nn.Conv2d(3, 4, 3, padding_mode="circular"), nn.ReLU(), nn.Conv2d(4, 4, 3)), ["2"], tmp_path
    )


def test_weights_on_the_meta_device_are_refused():
    with pytest.raises(ModelError, match=r'"0" \(Linear\) is on the meta device'):
        amct.quantize(nn.Sequential(nn.Linear(4, 2, device="meta")), [torch.ones(2, 4)])


@pytest.mark.filterwarnings("ignore:.torch.jit.trace.*is deprecated")
def test_traced_and_scripted_modules_are_refused_or_named(tmp_path):
    inner = nn.Sequential(nn.Linear(4, 4))
    traced = torch.jit.trace(inner, torch.ones(2, 4))
    with pytest.raises(ModelError, match="the model is a ScriptModule"):
        amct.quantize(traced, [torch.ones(2, 4)])
    quantized = amct.quantize(nn.Sequential(nn.Linear(4, 4), traced), [torch.ones(2, 4)])
    with pytest.raises(ExportError, match=r'module "1" is a ScriptModule; use the nn\.Module'):
        quantized.save(tmp_path / "net", formats=("qdq",))


# -- a batch norm with an activation inside ----------------------------------------------------------------------------


class NormAct(nn.BatchNorm2d):
    """A batch norm that also has an activation, as image models write it."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop = nn.Identity()
        self.act = nn.Hardswish()

    def forward(self, x):
        x = functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return self.act(self.drop(x))


def test_a_batch_norm_with_an_activation_is_folded_and_keeps_the_activation(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), NormAct(4), nn.Conv2d(4, 4, 3)).eval()
    nn.init.uniform_(model[1].running_mean, -1, 1)
    nn.init.uniform_(model[1].running_var, 0.5, 2)
    assert_quantized(model, ["0", "2"], tmp_path)
    quantized = amct.quantize(model, [image()])
    assert quantized.skipped == ()
    graph = onnx.load(quantized.save(tmp_path / "net", formats=("fake_quant",))[0]).graph
    operators = [node.op_type for node in graph.node]
    assert "BatchNormalization" not in operators
    assert operators.count("HardSwish") == 1


# -- what stays float --------------------------------------------------------------------------------------------------


def test_without_a_quantizable_layer_each_layer_is_listed_with_its_reason():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU())
    with pytest.raises(ValueError, match=r"no layer that can be quantized") as caught:
        amct.quantize(model, [image()])
    text = str(caught.value)
    assert '0 (Conv2d): padding_mode is "reflect"' in text
    assert "1 (ReLU): this type cannot" in text


def test_the_four_functions_log_what_stays_float(tmp_path, caplog):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU(), nn.Conv2d(4, 4, 3))
    with caplog.at_level(logging.INFO, logger="amct"):
        Flow(tmp_path, model, image()).configure().quantize()
    assert 'left as it is: "0": padding_mode is "reflect"' in caplog.text


def test_no_message_names_tensors_that_the_user_cannot_know(caplog):
    model = Net(lambda s, x: head(s, functional.gelu(s.c(x)) * torch.softmax(s.c.bias, 0).reshape(1, 4, 1, 1)))
    with caplog.at_level(logging.INFO, logger="amct"):
        amct.quantize(model, [image()])
    assert "not observed" not in caplog.text
