"""AMCT's automatic search for channels to prune."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import amct_pytorch
from amct.errors import ArgumentError, ArgumentTypeError, ConfigError, SearchError
from amct_pytorch.common.auto_channel_prune import TaylorLossSensitivity
from amct_pytorch.common.auto_channel_prune.search_channel_base import GreedySearch, SearchChannelBase
from amct_pytorch.common.auto_channel_prune.sensitivity_base import SensitivityBase


def block(inputs, outputs, **options):
    return [nn.Conv2d(inputs, outputs, 3, padding=1, **options), nn.BatchNorm2d(outputs), nn.ReLU()]


def network():
    torch.manual_seed(0)
    depthwise = block(48, 48, groups=48)
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)]
    return nn.Sequential(*block(2, 32), *block(32, 48), *depthwise, *block(48, 32), *end).eval()


LAYERS = ("0", "3", "9", "14")


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 2, 8, 8, generator=generator), torch.randn(6, 5, generator=generator)]


def macs(model, x):
    """Multiply-accumulate operations counted by hooks."""
    counted = []
    layers = [module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    handles = [
        each.register_forward_hook(lambda m, _, y: counted.append(y[0].numel() * m.weight[0].numel()))
        for each in layers
    ]
    model.eval()(x[:1])
    for handle in handles:
        handle.remove()
    return sum(counted)


def searched(tmp_path, data, config, model=None, **options):
    (tmp_path / "search.cfg").write_text(config)
    model = model or network()
    amct_pytorch.auto_channel_prune_search(
        model, str(tmp_path / "search.cfg"), data, str(tmp_path / "prune.cfg"), **options
    )
    return (tmp_path / "prune.cfg").read_text()


def pruned(tmp_path, data, model=None):
    return amct_pytorch.create_prune_retrain_model(
        model or network(), data[0][:1], str(tmp_path / "prune.cfg"), str(tmp_path / "record.txt")
    )


@pytest.mark.parametrize(("ratio", "ascend"), [(1.3, False), (2.5, False), (1.4, True)])
def test_the_config_gives_the_compress_ratio(ratio, ascend, tmp_path, data):
    searched(tmp_path, data, f"compress_ratio: {ratio} ascend_optimized: {str(ascend).lower()}")
    small, whole = pruned(tmp_path, data), network()
    reached = macs(whole, data[0]) / macs(small, data[0])
    assert ratio <= reached < ratio * (1.5 if ascend else 1.1)
    if ascend:
        assert all(small.get_submodule(name).out_channels % 16 == 0 for name in ("0", "3", "9"))


def test_the_sensitivity_is_the_sum_of_terms_of_single_samples(tmp_path, data):
    seen = {}

    class Spy(GreedySearch):
        def channel_prune_search(self, graph_info, search_records, prune_config):
            for record in search_records:
                values = next(list(each.floats) for each in record.producer[0].attr if each.name == "sensitivity")
                seen[record.producer[0].name] = values
            return super().channel_prune_search(graph_info, search_records, prune_config)

    searched(tmp_path, data, "compress_ratio: 1.1 test_iteration: 3", search_alg=Spy())
    model = network()
    wanted = dict.fromkeys(("9", "14"), 0.0)
    for number in range(3):
        model.zero_grad()
        nn.functional.l1_loss(model(data[0][number : number + 1]), data[1][number : number + 1]).backward()
        for name in wanted:
            weight = model.get_submodule(name).weight
            wanted[name] = wanted[name] + (weight * weight.grad).abs().detach().double().numpy()
    makes, reads = wanted["9"].sum((1, 2, 3)), wanted["14"].sum(0)
    np.testing.assert_allclose(seen["9"], makes + reads, rtol=1e-5)


def test_layers_that_an_override_fixes(tmp_path, data):
    (tmp_path / "fixed.cfg").write_text(
        'regular_prune_skip_layers: "9" override_layer_configs { layer_name: "3" prune_config { filter_pruner { '
        "balanced_l2_norm_filter_prune { prune_ratio: 0.25 ascend_optimized: false } } } }"
    )
    searched(tmp_path, data, f'compress_ratio: 1.2 ascend_optimized: false override_prune_cfg: "{tmp_path}/fixed.cfg"')
    small = pruned(tmp_path, data)
    assert small[3].out_channels == 36
    assert small[9].out_channels == 32


def test_max_prune_ratio_is_kept(tmp_path, data, caplog):
    searched(tmp_path, data, "compress_ratio: 3.9 max_prune_ratio: 0.25 ascend_optimized: false")
    small, whole = pruned(tmp_path, data), network()
    for name in ("0", "3", "9"):
        before, after = (each.get_submodule(name).out_channels for each in (whole, small))
        assert after == before * 3 // 4 or before == after  # "0" reads one channel pair only, and may stay
    assert "compress_ratio 3.9 was not reached" in caplog.text


def test_classes_of_the_user(tmp_path, data):
    """A sensitivity and a search that know what they want: every second channel of layer 3."""
    calls = []

    class Numbers(SensitivityBase):
        def setup_initialization(self, graph_tuple, input_data, test_iteration, output_nodes=None):
            assert output_nodes is None
            graph, graph_info = graph_tuple
            calls.append((type(graph.model), sorted(graph_info["3"]), len(input_data), test_iteration))

        def get_sensitivity(self, search_records):
            for record in search_records:
                end = next(each.i for each in record.producer[0].attr if each.name == "end")
                attribute = record.producer[0].attr.add(name="sensitivity", type=4)
                attribute.floats.extend(range(end))

    class EverySecond(SearchChannelBase):
        def channel_prune_search(self, graph_info, search_records, prune_config):
            calls.append(prune_config)
            names = [node.name for record in search_records for node in record.producer]
            found = {name: [1] * graph_info[name]["ori_cout"] for name in names}
            found["3"] = [1, 0] * 24
            return found

    searched(
        tmp_path, data, "compress_ratio: 1.5 ascend_optimized: false", sensitivity=Numbers(), search_alg=EverySecond()
    )
    assert calls == [(nn.Sequential, ["bitops", "cin", "cout", "ori_cout"], 2, 1), (1.5, False, 1.0)]
    small = pruned(tmp_path, data)
    assert [small[int(name)].out_channels for name in ("0", "3", "9")] == [32, 24, 32]


def test_another_loss(tmp_path, data):
    measure = TaylorLossSensitivity()
    measure.set_loss_func(nn.functional.cross_entropy)
    searched(tmp_path, [data[0], torch.arange(6) % 5], "compress_ratio: 1.2", sensitivity=measure)
    assert "prune_ratio" in (tmp_path / "prune.cfg").read_text()


class Nothing(SensitivityBase):
    def setup_initialization(self, graph_tuple, input_data, test_iteration, output_nodes=None):
        pass

    def get_sensitivity(self, search_records):
        pass


class Wrong(SearchChannelBase):
    def channel_prune_search(self, graph_info, search_records, prune_config):
        return {"3": [len(graph_info), len(search_records), *prune_config]}


@pytest.mark.parametrize(
    ("config", "given", "error", "message"),
    [
        ("compress_ratio: 0.5", {}, ConfigError, "compress_ratio"),
        ("compress_ratio: 2 max_prune_ratio: 0", {}, ConfigError, "max_prune_ratio"),
        ("compress_ratio: 2 test_iteration: 0", {}, ConfigError, "test_iteration"),
        ("compress_ratio:", {}, RuntimeError, "search.cfg:1"),
        ("compress_ratio: 2 test_iteration: 7", {}, ArgumentError, "test_iteration is 7, but there are 6 samples"),
        ("compress_ratio: 2", {"input_data": torch.zeros(1)}, ArgumentTypeError, "expected a list [data, label]"),
        ("compress_ratio: 2", {"input_data": [torch.zeros(1, 2, 8, 8)]}, ArgumentError, "a list of two tensors"),
        ("compress_ratio: 2", {"sensitivity": "Taylor"}, ArgumentError, 'expected "TaylorLossSensitivity"'),
        ("compress_ratio: 2", {"search_alg": 3}, TypeError, "a class derived from SearchChannelBase, got int"),
        ("compress_ratio: 2", {"sensitivity": Nothing()}, SearchError, 'with 32 finite numbers, got none'),
        ("compress_ratio: 2", {"search_alg": Wrong()}, SearchError, "a list of 32 times 0 or 1"),
    ],
)  # fmt: skip
def test_mistakes(config, given, error, message, tmp_path, data):
    (tmp_path / "search.cfg").write_text(config)
    arguments = {"input_data": data} | given
    with pytest.raises(error) as caught:
        amct_pytorch.auto_channel_prune_search(
            model=network(), config=str(tmp_path / "search.cfg"), output_cfg=str(tmp_path / "out.cfg"), **arguments
        )
    assert message in str(caught.value)
    assert not (tmp_path / "out.cfg").exists()


def test_a_model_without_chains_gets_a_config_that_says_so(tmp_path, data, caplog):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(144, 5))
    text = searched(tmp_path, data, "compress_ratio: 2", model)
    assert "no layer that may be searched is in a chain" in caplog.text
    assert 'regular_prune_skip_layers: "0"' in text
