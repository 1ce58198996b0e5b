"""Moving averages of weights: torch's AveragedModel of models, single modules and sparse layers in training."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from qat_helpers import Flow, evaluate, images, net, run_onnx, train
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import amct.pytorch as amct
import amct_pytorch
from amct.numerics.pruning import two_of_four_mask
from amct.pytorch.pruning.sparse import make_plain, sparse_layers

DECAY = 0.8


def averaged(model, *, use_buffers=True):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=use_buffers)


def train_with(average, model, steps):
    """Train with an average beside; returns what the average of each floating-point number should be."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    expected: dict[str, torch.Tensor] = {}
    for step in steps:
        train(model, [step], optimizer)
        average.update_parameters(model)
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if value.is_floating_point():
                value = value.detach()
                before = expected.get(name, value).clone()
                expected[name] = DECAY * before + (1 - DECAY) * value
    return expected


@pytest.mark.parametrize("target", ["exact8", "portable"])
@pytest.mark.parametrize("use_buffers", [True, False])
def test_an_average_is_that_of_the_numbers_and_is_saved_like_any_model(tmp_path, use_buffers, target):
    model = amct.prepare_qat(net(), images(), target=target)
    average = averaged(model, use_buffers=use_buffers)
    expected = train_with(average, model, range(4))
    assert not torch.equal(average.module.c1.input_quantizer.clip_max, model.c1.input_quantizer.clip_max)
    trained = {name for name, _ in model.named_parameters()}
    for name, value in average.module.state_dict().items():
        if value.is_floating_point() and (use_buffers or name in trained):
            torch.testing.assert_close(value, expected[name], msg=name)
    result = average.module
    kind = {"exact8": "fake_quant", "portable": "qdq"}[target]
    result.save(tmp_path / "net", formats=[kind], data=images())
    wanted = evaluate(result, images(5)).numpy()
    found = run_onnx(tmp_path / f"net_{kind}_model.onnx", images(5))
    assert np.linalg.norm(found - wanted) < 0.02 * np.linalg.norm(wanted)
    assert np.linalg.norm(found - evaluate(model, images(5)).numpy()) > 0.1 * np.linalg.norm(wanted)  # the last one


def test_the_state_of_an_average_loads_and_computes_the_same(tmp_path):
    flow = Flow(tmp_path)
    model = flow.create()
    average = averaged(model)
    train_with(average, model, range(3))
    torch.save(average.module.state_dict(), flow.state)
    restored = flow.restore()
    assert torch.equal(evaluate(restored, images(5)), evaluate(average.module, images(5)))
    assert torch.equal(evaluate(average, images(5)), evaluate(average.module, images(5)))


@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize("batch_num", [1, 3])
def test_an_average_made_before_the_first_batch_keeps_its_clips_when_norms_are_refreshed(
    tmp_path, batch_num, use_buffers
):
    flow = Flow(tmp_path, f"batch_num: {batch_num}")
    model = flow.create()
    average = averaged(model, use_buffers=use_buffers)
    train_with(average, model, range(4))
    clips = average.module.c1.input_quantizer.clips
    assert clips != model.c1.input_quantizer.clips
    torch.save(average.module.state_dict(), flow.state)
    for each in (average.module, flow.restore()):
        update_bn([100 * images(seed) for seed in range(4)], each)
        assert each.c1.input_quantizer.clips == clips
        assert each.c1.input_quantizer.is_ready


@pytest.mark.parametrize("use_buffers", [True, False])
def test_averages_of_single_modules_do_not_observe(use_buffers):
    torch.manual_seed(0)
    weights = {"retrain_weight_config": {"weights_retrain_algo": "ulq_retrain"}}
    for config in (None, weights):
        model = amct_pytorch.LinearQAT(5, 7, config=config)
        average = averaged(model, use_buffers=use_buffers)
        x = torch.randn(20, 5)
        for factor in (1.0, 1.1, 1.2):
            model(factor * x).square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.05).step()
            average.update_parameters(model)
        clip, scales = average.module.acts_clip_max.clone(), average.module.wts_scales.clone()
        average.eval()(100 * x)
        assert torch.equal(average.module.acts_clip_max, clip)
        assert config is None or torch.equal(average.module.wts_scales, scales)


def test_masks_that_stay_are_averaged_with_the_buffers_and_others_copied_without():
    for update_freq, use_buffers in ((0, True), (1, False)):
        model = amct.sparsify(net(), images(), update_freq=update_freq).model
        average = averaged(model, use_buffers=use_buffers)
        first = copy.deepcopy(model)
        train_with(average, model, range(4))
        changed = [
            not torch.equal(layer.weight_mask, sparse_layers(first)[name].weight_mask)
            for name, layer in sparse_layers(model).items()
        ]
        assert any(changed) == bool(update_freq)
        for name, layer in sparse_layers(average.module).items():
            assert torch.equal(layer.weight_mask, sparse_layers(model)[name].weight_mask)
        plain = copy.deepcopy(average.module)
        make_plain(plain)
        assert torch.equal(plain.c2.weight * two_of_four_mask(plain.c2.weight, 1), plain.c2.weight)
        assert torch.equal(evaluate(plain, images(5)), evaluate(average.module, images(5)))
