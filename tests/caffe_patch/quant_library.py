"""libquant.so through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PATCH = Path(__file__).parents[2] / "src" / "caffe_patch"
SMALL = Path(__file__).with_name("small_caffe")


class IfmrSettings(ctypes.Structure):
    """``quant_ifmr_settings``."""

    _fields_ = (
        ("bits", c_int),
        ("with_offset", c_int),
        ("search_start", c_double),
        ("search_end", c_double),
        ("search_step", c_double),
        ("max_percentile", c_double),
        ("min_percentile", c_double),
        ("batches", c_int64),
    )


class IfmrResult(ctypes.Structure):
    """``quant_ifmr_result``."""

    _fields_ = (
        ("scale", c_float),
        ("offset", ctypes.c_int32),
        ("clip_min", c_float),
        ("clip_max", c_float),
        ("near_zero", c_int),
    )


@dataclass
class QuantLibrary:
    """The functions of the library on arrays; a failure is a ValueError with the library's words."""

    path: object

    def __post_init__(self):
        self.lib = ctypes.CDLL(str(self.path))
        self.lib.quant_error.restype = c_char_p
        self.lib.quant_ifmr_new.restype = c_void_p
        self.lib.quant_ifmr_new.argtypes = [POINTER(IfmrSettings)]
        self.lib.quant_ifmr_observe.argtypes = [c_void_p, c_void_p, c_size_t]
        self.lib.quant_ifmr_find.argtypes = [c_void_p, POINTER(IfmrResult)]
        self.lib.quant_ifmr_free.argtypes = [c_void_p]
        self.lib.quant_ifmr_free.restype = None

    def _check(self, failed):
        if failed:
            raise ValueError(self.lib.quant_error().decode())

    def factors(self, low, high, bits, with_offset):
        """Scale, offset and whether the range is practically nothing."""
        scale, offset, near = c_float(), c_int(), c_int()
        numbers = c_double(low), c_double(high), bits, int(with_offset)
        self._check(self.lib.quant_factors(*numbers, byref(scale), byref(offset), byref(near)))
        return np.float32(scale.value), offset.value, bool(near.value)

    def check_factors(self, scale, offset, bits):
        """Raise unless they are legal."""
        self._check(self.lib.quant_check_factors(c_float(scale), offset, bits))

    def quantize(self, x, scale, offset, bits):
        """The integers."""
        q = np.empty(x.shape, np.int32)
        self._check(self.lib.quant_quantize(_at(x), c_size_t(x.size), c_float(scale), offset, bits, _at(q)))
        return q

    def dequantize(self, q, scale, offset):
        """The real numbers."""
        x = np.empty(q.shape, np.float32)
        self.lib.quant_dequantize(_at(q), c_size_t(q.size), c_float(scale), offset, _at(x))
        return x

    def fake(self, x, scale, offset, bits):
        """Quantized and dequantized."""
        out = np.empty_like(x)
        self.lib.quant_fake(_at(x), c_size_t(x.size), c_float(scale), offset, bits, _at(out))
        return out

    def fake_gradient(self, x, upstream, scale, offset, bits):
        """The straight-through gradient."""
        out = np.empty_like(x)
        self.lib.quant_fake_gradient(_at(x), _at(upstream), c_size_t(x.size), c_float(scale), offset, bits, _at(out))
        return out

    def ifmr(self, batches, **settings):
        """The result for batches of data."""
        defaults = {"bits": 8, "with_offset": 1, "search_start": 0.7, "search_end": 1.3, "search_step": 0.01}
        percentiles = {"max_percentile": 0.999999, "min_percentile": 0.999999, "batches": len(batches)}
        observer = self.lib.quant_ifmr_new(byref(IfmrSettings(**(defaults | percentiles | settings))))
        self._check(observer is None)
        try:
            for batch in batches:
                self._check(self.lib.quant_ifmr_observe(observer, _at(batch), batch.size))
            result = IfmrResult()
            self._check(self.lib.quant_ifmr_find(observer, byref(result)))
            return result
        finally:
            self.lib.quant_ifmr_free(observer)

    def arq(self, rows, bits, channel_wise):
        """The scales of a weight."""
        scales = np.empty(len(rows) if channel_wise else 1, np.float32)
        sizes = c_size_t(len(rows)), c_size_t(rows.shape[1])
        self._check(self.lib.quant_arq(_at(rows), *sizes, bits, int(channel_wise), _at(scales)))
        return scales

    def fake_rows(self, rows, bits, scales):
        """A weight on the grid of its scales."""
        out = np.empty_like(rows)
        sizes = c_size_t(len(rows)), c_size_t(rows.shape[1])
        self.lib.quant_fake_rows(_at(rows), *sizes, bits, _at(scales), c_size_t(scales.size), _at(out))
        return out

    def snq_decode(self, packed, row_size, tables):
        """The int8 values of packed indices."""
        rows = np.empty((len(packed), row_size), np.int8)
        sizes = c_size_t(len(packed)), c_size_t(row_size)
        self.lib.quant_snq_decode(_at(packed), *sizes, _at(tables), c_size_t(len(tables)), _at(rows))
        return rows

    def find_integers(self, rows, bias, scale_data):
        """The integers and scales of a dequantized weight."""
        integers, scales, count = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32), c_size_t()
        sizes, added = [c_size_t(size) for size in rows.shape], None if bias is None else _at(bias)
        places = _at(integers), _at(scales), byref(count)
        self._check(self.lib.quant_find_integers(_at(rows), *sizes, added, c_float(scale_data), *places))
        return integers, scales[: count.value]

    def sum_steps(self, integers, scales, bias, scale_data):
        """The bias in steps, and the step of each row."""
        whole, steps = np.empty(len(integers), np.int32), np.empty(len(integers), np.float32)
        sizes, added = [c_size_t(size) for size in integers.shape], None if bias is None else _at(bias)
        given = _at(scales), c_size_t(scales.size), added, c_float(scale_data)
        self.lib.quant_sum_steps(_at(integers), *sizes, *given, _at(whole), _at(steps))
        return whole, steps

    def ulq(self, x, low, high, bits):
        """Rounded between two clips."""
        out = np.empty_like(x)
        self.lib.quant_ulq_forward(_at(x), c_size_t(x.size), c_float(low), c_float(high), bits, _at(out))
        return out

    def ulq_factors(self, low, high, bits):
        """Scale and offset of two clips."""
        scale, offset = c_float(), c_int()
        self.lib.quant_ulq_factors(c_float(low), c_float(high), bits, byref(scale), byref(offset))
        return np.float32(scale.value), offset.value

    def ulq_backward(self, x, upstream, low, high, bits):
        """The gradients of the input and both clips."""
        out, of_low, of_high = np.empty_like(x), c_float(), c_float()
        clips = c_float(low), c_float(high), bits
        size = c_size_t(x.size)
        self.lib.quant_ulq_backward(_at(x), _at(upstream), size, *clips, _at(out), byref(of_low), byref(of_high))
        return out, of_low.value, of_high.value

    def ulq_legal(self, low, high, valid_low, valid_high):
        """The clips, illegal ones replaced, and whether one was."""
        ends = c_float(low), c_float(high)
        changed = self.lib.quant_ulq_legal(byref(ends[0]), byref(ends[1]), c_float(valid_low), c_float(valid_high))
        return ends[0].value, ends[1].value, bool(changed)

    def bn_update(self, x, fraction, blobs):
        """Add the statistics of a batch to the three blobs, in place."""
        sizes = [c_size_t(size) for size in (*x.shape[:2], int(np.prod(x.shape[2:])))]
        self.lib.quant_bn_update(_at(x), *sizes, c_float(fraction), *(_at(blob) for blob in blobs))

    def gemm(self, w, x, offset):
        """The exact sums."""
        out = np.empty((len(w), x.shape[1]), np.int64)
        sizes = [c_size_t(size) for size in (*w.shape, x.shape[1])]
        self.lib.quant_integer_gemm(_at(w), _at(x), *sizes, offset, _at(out))
        return out

    def dequantize_sums(self, sums, bias, steps):
        """The real numbers of sums."""
        out = np.empty(sums.shape, np.float32)
        sizes = c_size_t(len(sums)), c_size_t(sums.shape[1])
        added = None if bias is None else _at(bias)
        self.lib.quant_dequantize_sums(_at(sums), *sizes, added, _at(steps), c_size_t(steps.size), _at(out))
        return out


def _at(array):
    assert array.flags.c_contiguous
    return array.ctypes.data_as(c_void_p)
