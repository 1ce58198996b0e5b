"""The quantizers as modules: how clips begin, stay legal, and what they say when training diverges."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from amct.errors import TrainingError
from amct.numerics.arq import WeightKind, arq
from amct.numerics.ifmr import IfmrObserver
from amct.numerics.settings import IfmrSettings
from amct.pipeline.weights import FloatWeight
from amct.pytorch.qat.quantizers import ActivationQuantizer, WeightQuantizer


def values(seed, size=1000):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def best_clips(*batches, bits=8):
    observer = IfmrObserver(IfmrSettings(num_bits=bits, asymmetric=False))
    for batch in batches:
        observer.observe(batch)
    found = observer.result()
    return found.clip_min.item(), found.clip_max.item()


def test_the_first_batches_are_quantized_to_their_own_range_and_the_last_sets_the_best_clips():
    quantizer = ActivationQuantizer("c", 8, batch_num=3)
    batches = [values(seed) for seed in range(3)]
    for batch in batches[:2]:
        y = quantizer(batch)
        assert quantizer.clips == (batch.min().item(), batch.max().item())
        assert not torch.equal(y, batch)
        assert not quantizer.is_ready
    quantizer(batches[2])
    assert quantizer.clips == best_clips(*batches)
    assert quantizer.is_ready
    quantizer(values(9))
    assert quantizer.clips == best_clips(*batches)


def test_eval_changes_nothing_and_passes_on_what_has_no_range_yet():
    quantizer = ActivationQuantizer("c", 8).eval()
    x = values(0)
    assert quantizer(x) is x
    quantizer.train()(x)
    clips = quantizer.clips
    state = {key: value.clone() for key, value in quantizer.state_dict().items()}
    quantizer.eval()(100 * x)
    assert quantizer.clips == clips
    assert all(torch.equal(state[key], value) for key, value in quantizer.state_dict().items())


def test_a_fixed_lower_clip_is_no_parameter():
    quantizer = ActivationQuantizer("c", 8, fixed_min=True)
    quantizer(values(0).abs())
    assert [name for name, _ in quantizer.named_parameters()] == ["clip_max"]
    assert quantizer.clips[0] == 0


def test_given_clips_are_used_from_the_first_batch_on():
    quantizer = ActivationQuantizer("c", 8, clips=(-3.0, 6.0))
    quantizer(values(0))
    assert quantizer.clips == (-3.0, 6.0)


def test_illegal_clips_are_restored_in_training():
    quantizer = ActivationQuantizer("c", 8, clips=(-1.0, 2.0))
    quantizer(values(0))
    expected, factors = quantizer(values(0)), quantizer.qparams()
    with torch.no_grad():
        quantizer.clip_max.fill_(-0.5)
    assert torch.equal(quantizer.eval()(values(0)), expected)  # the last step of an optimizer may have done that
    assert quantizer.qparams() == factors
    assert quantizer.clip_max == -0.5  # eval changes nothing
    quantizer.train()(values(0))
    assert (quantizer.clip_min.item(), quantizer.clip_max.item()) == (-1.0, 2.0)


def test_clips_that_are_not_finite_are_named_with_their_layer():
    quantizer = ActivationQuantizer("stage.conv", 8, clips=(-1.0, 2.0))
    with torch.no_grad():
        quantizer.clip_max.fill_(math.nan)
    with pytest.raises(TrainingError, match=r'layer "stage.conv": the trained clips are -1 and nan.*checkpoint'):
        quantizer(values(0))


def test_data_that_is_not_finite_is_named_with_its_layer():
    quantizer = ActivationQuantizer("stage.conv", 8)
    with pytest.raises(TrainingError, match=r'layer "stage.conv": the activation holds 1 NaN'):
        quantizer(torch.tensor([1.0, math.nan]))
    assert not quantizer.has_clips()


def test_factors_before_the_range_is_known_say_what_to_do():
    with pytest.raises(TrainingError, match=r'layer "c": .*not known yet; run at least 2 batches in train mode'):
        ActivationQuantizer("c", 8, batch_num=2).qparams()


def test_a_state_in_the_middle_of_the_first_batches_goes_on():
    first, other = (ActivationQuantizer("c", 8, batch_num=2) for _ in range(2))
    first(values(0))
    other.load_state_dict(first.state_dict())
    assert other.clips == first.clips
    assert not other.is_ready
    other(values(1))
    assert other.clips == best_clips(values(0), values(1))
    assert not any("observed" in name for name in other.state_dict())


def test_a_state_without_the_first_batches_begins_them_anew():
    first, other = (ActivationQuantizer("c", 8, batch_num=2) for _ in range(2))
    first(values(0))
    other.load_state_dict({name: value for name, value in first.state_dict().items() if "observed" not in name})
    other(values(1))
    assert not other.is_ready
    other(values(2))
    assert other.clips == best_clips(values(1), values(2))


def test_a_copy_that_is_given_averaged_clips_does_not_determine_its_own():
    quantizer = ActivationQuantizer("c", 8)
    average = copy.deepcopy(quantizer)
    quantizer(values(0))
    with torch.no_grad():
        for own, other in zip(average.parameters(), quantizer.parameters(), strict=True):
            own.copy_(other)
    assert not torch.equal(average.eval()(values(1)), values(1))
    average.train()(100 * values(1))
    assert average.clips == quantizer.clips


# -- weights -----------------------------------------------------------------------------------------------------------


def part(shape, kind=WeightKind.CONV, groups=1):
    return FloatWeight(name="weight", tensor=values(4, math.prod(shape)).reshape(shape), kind=kind, groups=groups)


def test_learned_scales_begin_as_those_of_arq():
    weight = part((4, 3, 2, 2))
    quantizer = WeightQuantizer(weight, 8, learned=True)
    assert torch.equal(quantizer.scale, arq(weight.tensor, kind=WeightKind.CONV).scale)


def test_a_measured_scale_is_no_parameter():
    quantizer = WeightQuantizer(part((4, 3, 2, 2)), 8)
    assert not list(quantizer.parameters())
    assert list(quantizer.state_dict()) == ["trained_bits"]


def test_illegal_scales_are_restored_in_training():
    weight = part((2, 3, 1, 1))
    quantizer = WeightQuantizer(weight, 8, learned=True)
    before = quantizer.scale.tolist()
    with torch.no_grad():
        quantizer.scale[0] = -1
    assert quantizer.scales(weight.tensor).tolist() == before
    quantizer(weight.tensor)
    assert quantizer.scale.tolist() == before


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize(
    ("kind", "shape", "groups"),
    [(WeightKind.CONV, (4, 2, 3), 1), (WeightKind.CONV_TRANSPOSE, (4, 3, 2), 2), (WeightKind.LINEAR, (4, 5), 1)],
)
def test_integers_times_scale_is_what_training_computes(learned, kind, shape, groups):
    weight = part(shape, kind, groups)
    outputs = shape[1] * groups if kind is WeightKind.CONV_TRANSPOSE else shape[0]
    norm = nn.BatchNorm1d(outputs)
    nn.init.uniform_(norm.weight, -1, 1)
    quantizer = WeightQuantizer(weight, 4, learned=learned, norm=norm)
    integers, scale = quantizer.integers(weight.tensor), quantizer.scales(weight.tensor)
    assert torch.equal(integers * scale[:, None], quantizer.rows(quantizer(weight.tensor)))
    assert integers[norm.weight < 0].min() >= -7
