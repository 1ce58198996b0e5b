"""The arithmetic of the patch against that of the engine: integers identical, scales to one step of float32."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from quant_library import PATCH

from amct.caffe.engine.blob import Blob
from amct.caffe.engine.layers.batch_norm import BatchNorm
from amct.caffe.engine.layers.ifmr import IfmrLayerObserver
from amct.numerics import affine
from amct.numerics.affine import SymmetricScale, integer_range, scalar_factors
from amct.numerics.arq import WeightKind, arq, fake_quantize_weight
from amct.numerics.integer import find_integer_weights, integer_bias, sum_scale
from amct.numerics.settings import IfmrSettings
from amct.numerics.snq import decode, pack_nibbles
from amct.numerics.training.quantizers import ulq, ulq_factors, valid_clips

GOLDEN = Path(__file__).parents[1] / "golden" / "numerics"
BITS = st.sampled_from([2, 4, 8, 12, 16])
NUMBERS = st.floats(-1e4, 1e4, width=32)
ARRAYS = hnp.arrays(np.float32, st.integers(1, 60), elements=NUMBERS)
SCALES = st.floats(2.0**-20, 2.0**10, width=32)
with_library = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def one_step(found, wanted):
    return abs(np.float32(found) - np.float32(wanted)) <= np.spacing(np.float32(wanted))


@with_library
@given(ends=st.tuples(NUMBERS, NUMBERS), bits=BITS, with_offset=st.booleans())
def test_factors(library, ends, bits, with_offset):
    low, high = sorted(ends)
    wanted = scalar_factors(low, high, bits, asymmetric=with_offset, symmetric_scale=SymmetricScale.FULL_RANGE)
    scale, offset, near_zero = library.factors(low, high, bits, with_offset)
    assert (offset, near_zero) == wanted[1:]
    assert scale == wanted[0]


@pytest.mark.parametrize("ends", [(0, float("inf")), (float("nan"), 1), (2, 1), (-1e30, 1e30), (0, 4e9)])
def test_ranges_that_are_no_ranges(library, ends):
    with pytest.raises(ValueError, match=r"finite with minimum <= maximum|too large for 8 bits"):
        library.factors(*ends, 8, with_offset=True)


@pytest.mark.parametrize(
    ("scale", "offset", "bits"), [(0, 0, 8), (1e9, 0, 8), (1, 128, 8), (1, 0, 17), (float("nan"), 0, 8)]
)
def test_illegal_factors(library, scale, offset, bits):
    library.check_factors(1.0, -128, 8)
    with pytest.raises(ValueError, match=r"scale is illegal|offset is illegal|bits: expected"):
        library.check_factors(scale, offset, bits)


@with_library
@given(x=ARRAYS, scale=SCALES, bits=BITS, data=st.data())
def test_quantize_dequantize_and_fake_quantize(library, x, scale, bits, data):
    offset = data.draw(st.integers(*integer_range(bits)))
    factors = torch.tensor(scale, dtype=torch.float32), torch.tensor(offset, dtype=torch.int32)
    q = library.quantize(x, scale, offset, bits)
    np.testing.assert_array_equal(q, affine.quantize(torch.from_numpy(x), *factors, bits))
    np.testing.assert_array_equal(
        library.dequantize(q, scale, offset), affine.dequantize(torch.from_numpy(q), *factors)
    )
    values = torch.from_numpy(x).requires_grad_()
    fake = affine.fake_quantize(values, *factors, bits)
    np.testing.assert_array_equal(library.fake(x, scale, offset, bits), fake.detach())
    upstream = np.linspace(-1, 1, x.size, dtype=np.float32)
    fake.backward(torch.from_numpy(upstream))
    np.testing.assert_array_equal(library.fake_gradient(x, upstream, scale, offset, bits), values.grad)


def test_nan_stays_or_is_refused(library):
    x = np.array([1, np.nan, np.inf, -np.inf], np.float32)
    np.testing.assert_array_equal(library.fake(x, 0.5, 3, 8), np.array([1, np.nan, 62, -65.5], np.float32))
    with pytest.raises(ValueError, match="NaN cannot be quantized: 1 of 4 values"):
        library.quantize(x, 0.5, 3, 8)


# -- IFMR --------------------------------------------------------------------------------------------------------------

RANDOM = np.random.default_rng(34)


def normal(*shape):
    return RANDOM.normal(size=shape).astype(np.float32)


DATA = {
    "few values": [normal(40) for _ in range(3)],
    "as many as are kept": [normal(1 << 13) for _ in range(8)],
    "behind a ReLU": [np.maximum(normal(20000), 0) for _ in range(2)],
    "one more than is kept": [normal(1 << 16), normal(1)],
    "many": [normal(50000) * scale for scale in (1, 3, 0.1)],
    "one large batch, sampled": [normal(1 << 20)],
    "large batches, sampled": [np.maximum(normal(1 << 19), 0) * 5 for _ in range(3)],
    "with outliers": [np.concatenate([normal(200000), np.array([40, -30, 1e3], np.float32)])],
    "pixels": [RANDOM.integers(0, 256, 150000).astype(np.float32) for _ in range(2)],
    "pixels, then numbers": [RANDOM.integers(0, 256, 90000).astype(np.float32), normal(90000)],
    "only positive": [np.abs(normal(100000)) + 1],
    "only negative": [-np.abs(normal(100000)) - 1],
    "of all sizes": [np.exp(normal(100000) * 3)],
    "zeros": [np.zeros(100, np.float32)],
    "many zeros": [np.zeros(100000, np.float32)],
    "practically nothing": [normal(100) * np.float32(1e-12)],
}


@pytest.mark.parametrize("given", DATA)
@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("with_offset", [False, True])
def test_ifmr_finds_what_the_engine_finds(library, given, bits, with_offset):
    for changed in ({}, {"max_percentile": 0.99, "min_percentile": 0.98, "search_step": 0.03}):
        chosen = {"max_percentile": 0.999999, "min_percentile": 0.999999, "search_step": 0.01} | changed
        observer = IfmrLayerObserver(IfmrSettings(num_bits=bits, asymmetric=with_offset, **chosen))
        observer.sample_for(len(DATA[given]))
        for batch in DATA[given]:
            observer.observe(torch.from_numpy(batch))
        wanted = observer.result()
        found = library.ifmr(DATA[given], bits=bits, with_offset=int(with_offset), **chosen)
        assert found.offset == wanted.zero_point
        assert one_step(found.scale, wanted.step)
        assert bool(found.near_zero) == bool(wanted.near_zero)
        assert found.clip_min == pytest.approx(float(wanted.clip_min), rel=1e-6)
        assert found.clip_max == pytest.approx(float(wanted.clip_max), rel=1e-6)


@with_library
@given(
    batches=st.lists(hnp.arrays(np.float32, st.integers(1, 40), elements=NUMBERS), min_size=1, max_size=4),
    with_offset=st.booleans(),
    bits=st.sampled_from([8, 16]),
)
def test_ifmr_on_any_few_values(library, batches, with_offset, bits):
    observer = IfmrLayerObserver(IfmrSettings(num_bits=bits, asymmetric=with_offset))
    observer.sample_for(len(batches))
    for batch in batches:
        observer.observe(torch.from_numpy(batch))
    wanted = observer.result()
    found = library.ifmr(batches, bits=bits, with_offset=int(with_offset))
    assert found.offset == wanted.zero_point
    assert one_step(found.scale, wanted.step)


def test_ifmr_on_the_goldens(library):
    with np.load(GOLDEN / "observed.npz") as archive:
        arrays = [archive[name].astype(np.float32).ravel() for name in archive.files if archive[name].size > 1000]
    arrays = [values for values in arrays if np.isfinite(values).all()]
    assert len(arrays) > 2
    for values in arrays:
        observer = IfmrLayerObserver(IfmrSettings())
        observer.sample_for(1)
        observer.observe(torch.from_numpy(values))
        found = library.ifmr([values])
        assert found.offset == observer.result().zero_point
        assert one_step(found.scale, observer.result().step)


def test_ifmr_refuses_what_cannot_be_searched(library):
    for wrong in ([np.nan, 1], [np.inf, 1]):
        with pytest.raises(ValueError, match=r"holds [01] NaN and [01] infinite values among 2"):
            library.ifmr([np.array(wrong, np.float32)])
    with pytest.raises(ValueError, match="too large for 8 bits"):
        library.ifmr([np.array([1e30, -1e30], np.float32)])
    with pytest.raises(ValueError, match="no activation values were observed"):
        library.ifmr([])
    for wrong in ({"bits": 1}, {"search_start": 2}, {"search_step": 0}, {"max_percentile": 0.4}):
        with pytest.raises(ValueError, match="expected"):
            library.ifmr([np.ones(3, np.float32)], **wrong)


# -- Weights -----------------------------------------------------------------------------------------------------------


@with_library
@given(
    rows=hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2), elements=NUMBERS), channel_wise=st.booleans()
)
def test_arq(library, rows, channel_wise):
    weight = torch.from_numpy(rows)
    wanted = arq(weight, kind=WeightKind.LINEAR, channel_wise=channel_wise, symmetric_scale=SymmetricScale.FULL_RANGE)
    scales = library.arq(rows, 8, channel_wise)
    np.testing.assert_array_equal(scales, wanted.scale)
    np.testing.assert_array_equal(
        library.fake_rows(rows, 8, scales), fake_quantize_weight(weight, wanted, WeightKind.LINEAR)
    )


def test_arq_on_the_goldens_and_on_nonsense(library):
    with np.load(GOLDEN / "amct_weights.npz") as archive:
        weights = [
            archive[name] for name in archive.files if archive[name].ndim > 1 and archive[name].dtype == np.float32
        ]
    assert weights
    for weight in weights:
        rows = np.ascontiguousarray(weight.reshape(len(weight), -1))
        wanted = arq(torch.from_numpy(rows), kind=WeightKind.LINEAR, symmetric_scale=SymmetricScale.FULL_RANGE)
        np.testing.assert_array_equal(library.arq(rows, 8, True), wanted.scale)
    with pytest.raises(ValueError, match="NaN or infinity"):
        library.arq(np.array([[np.nan]], np.float32), 8, True)


@with_library
@given(size=st.integers(1, 9), tables=st.booleans(), seed=st.integers(0, 1000))
def test_tables_of_snq(library, size, tables, seed):
    random = np.random.default_rng(seed)
    indices = torch.from_numpy(random.integers(0, 16, (3, size)).astype(np.uint8))
    table = random.integers(-127, 128, (3 if tables else 1, 16)).astype(np.int8)
    packed = np.ascontiguousarray(pack_nibbles(indices).numpy())
    np.testing.assert_array_equal(
        library.snq_decode(packed, size, table), decode(indices, torch.from_numpy(table), WeightKind.LINEAR)
    )


@with_library
@given(
    seed=st.integers(0, 10000),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 9)),
    per_row=st.booleans(),
    largest=st.sampled_from([127, 128, 127, 5, 1, 0]),
    moved=st.booleans(),
)
def test_integers_of_dequantized_weights(library, seed, shape, per_row, largest, moved):
    random = np.random.default_rng(seed)
    integers = random.integers(-largest, largest + 1, shape).clip(-128, 127)
    scales = np.exp(random.normal(size=(shape[0] if per_row else 1, 1)) * 3).astype(np.float32)
    rows = np.ascontiguousarray(integers.astype(np.float32) * scales)
    scale_data = np.float32(np.exp(random.normal()))
    bias = (random.integers(-(10**5), 10**5, shape[0]) * (scales[:, 0].astype(np.float64) * scale_data)).astype(
        np.float32
    )
    if moved:
        rows.reshape(-1)[0] += 1e-3 * scales[0, 0]
    for each in (None, bias):
        tensor = None if each is None else torch.from_numpy(each)
        wanted = find_integer_weights(torch.from_numpy(rows), tensor, torch.tensor(scale_data))
        if wanted is None:
            with pytest.raises(ValueError, match="on no grid of 8 bits"):
                library.find_integers(rows, each, scale_data)
            continue
        found, steps = library.find_integers(rows, each, scale_data)
        np.testing.assert_array_equal(found, wanted.integers)
        np.testing.assert_array_equal(steps, wanted.scale)
        whole, of_sums = library.sum_steps(found, steps, each, scale_data)
        if tensor is None:
            np.testing.assert_array_equal(of_sums, sum_scale(wanted.scale, torch.tensor(scale_data)).expand(len(rows)))
        else:
            for mine, theirs in zip(
                (whole, of_sums), integer_bias(wanted, tensor, torch.tensor(scale_data)), strict=True
            ):
                np.testing.assert_array_equal(mine, theirs)


def test_weights_that_are_no_numbers_are_on_no_grid(library):
    with pytest.raises(ValueError, match="the weights or biases hold NaN or infinity"):
        library.find_integers(np.array([[np.inf, 1]], np.float32), None, 1.0)
    with pytest.raises(ValueError, match="the weights or biases hold NaN or infinity"):
        library.find_integers(np.ones((1, 2), np.float32), np.array([np.nan], np.float32), 1.0)


# -- ULQ, statistics, sums ---------------------------------------------------------------------------------------------


@with_library
@given(x=ARRAYS, low=st.floats(-100, 0, width=32), high=st.floats(0, 100, width=32), bits=st.sampled_from([4, 8, 12]))
def test_ulq(library, x, low, high, bits):
    clips = [torch.tensor(end, dtype=torch.float32, requires_grad=True) for end in (low, high)]
    scale, offset = library.ulq_factors(low, high, bits)
    wanted = ulq_factors(*clips, bits)
    assert (scale, offset) == (wanted[0].numpy(), int(wanted[1]))
    values = torch.from_numpy(x).requires_grad_()
    top = ulq(values, *clips, bits)
    np.testing.assert_array_equal(library.ulq(x, low, high, bits), top.detach())
    upstream = np.linspace(-1, 1, x.size, dtype=np.float32)
    top.backward(torch.from_numpy(upstream))
    passed, of_low, of_high = library.ulq_backward(x, upstream, low, high, bits)
    np.testing.assert_array_equal(passed, values.grad)
    allowed = 1e-4 * max(1, float(np.abs(upstream).sum()))
    assert of_low == pytest.approx(float(clips[0].grad), abs=allowed)
    assert of_high == pytest.approx(float(clips[1].grad), abs=allowed)


@with_library
@given(numbers=st.tuples(*[st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0])] * 2))
def test_illegal_clips_are_replaced(library, numbers):
    wanted = valid_clips(*(torch.tensor(each) for each in (*numbers, -7.0, 7.0)))
    found = library.ulq_legal(*numbers, -7.0, 7.0)
    assert found[:2] == tuple(float(each) for each in wanted)
    assert found[2] == (found[:2] != numbers)


def test_statistics_of_batch_norm(library):
    found = [np.zeros(3, np.float32), np.zeros(3, np.float32), np.zeros(1, np.float32)]
    layer = BatchNorm.__new__(BatchNorm)
    layer.fraction, layer.blobs = 0.9, [Blob(3), Blob(3), Blob(1)]
    for _ in range(3):
        x = normal(4, 3, 5, 5) * 3 + 1
        library.bn_update(x, 0.9, found)
        whole = torch.from_numpy(x).double()
        mean = whole.mean((0, 2, 3), keepdim=True)
        layer._collect(mean.float(), ((whole - mean) ** 2).mean((0, 2, 3)).float(), 100)
    for mine, blob in zip(found, layer.blobs, strict=True):
        np.testing.assert_allclose(mine, blob.tensor, rtol=1e-6)


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_sums_of_integers(library, bits):
    low, high = integer_range(bits)
    w = RANDOM.integers(-128, 128, (5, 700)).astype(np.int8)
    x = RANDOM.integers(low, high + 1, (700, 9)).astype(np.int16)
    w[0], x[:, 0] = -128, high
    for offset in (0, low, 5):
        sums = library.gemm(w, x, offset)
        np.testing.assert_array_equal(sums, w.astype(np.int64) @ (x.astype(np.int64) - offset))
    bias = RANDOM.integers(-(2**31), 2**31, 5).astype(np.int32)
    steps = np.abs(normal(5))
    wanted = ((sums + bias[:, None]) * steps.astype(np.float64)[:, None]).astype(np.float32)
    np.testing.assert_array_equal(library.dequantize_sums(sums, bias, steps), wanted)
    np.testing.assert_array_equal(
        library.dequantize_sums(sums, None, steps[:1]), (sums * np.float64(steps[0])).astype(np.float32)
    )


def test_no_memory_is_misused(compile_cpp, tmp_path):
    sources = [*sorted((PATCH / "quant_lib").glob("*.cpp")), Path(__file__).with_name("use_quant_lib.cpp")]
    options = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-I", PATCH / "quant_lib"]
    program = compile_cpp(tmp_path / "use", sources, *options)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "done\n"
