"""Small layers whose weights saturate the 16-bit sums of onnxruntime's kernels on x86 CPUs without VNNI.

``tests/golden/export/pair_kernels.npz`` holds what onnxruntime computes for them on such a CPU. It was written by

    qemu-x86_64 -cpu Haswell python tests/export/pair_kernels.py tests/golden/export/pair_kernels.npz

(qemu-user of Debian 12 and onnxruntime 1.31): the emulated CPU has AVX2 and no VNNI.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


@dataclass(frozen=True)
class Case:
    """One layer with integers as weights and input; its output has 255 steps of ``step``."""

    name: str
    operator: str
    weight: tuple[int, ...]
    """``[Cout, Cin/groups, ...]``."""
    input: tuple[int, ...]
    groups: int = 1

    def integers(self):
        """Weights and input, mostly large: many neighbours of one sign saturate, many do not."""
        random = np.random.default_rng(sum(self.name.encode()))
        weight = np.clip(random.normal(30, 70, self.weight), -128, 127).astype(np.int8)
        return weight, np.clip(random.normal(170, 90, self.input), 0, 255).astype(np.uint8)

    @property
    def step(self):
        return 300.0 * np.prod(self.weight[1:]) / 4


CASES = [
    Case("convolution of many channels", "Conv", (24, 8, 3, 3), (2, 8, 5, 5)),
    Case("pointwise", "Conv", (16, 12, 1, 1), (1, 12, 3, 3)),
    Case("of an image", "Conv", (16, 3, 3, 3), (1, 3, 6, 6)),
    Case("five inputs", "Conv", (7, 5, 2, 2), (1, 5, 4, 4)),
    Case("two groups", "Conv", (12, 6, 3, 1), (1, 12, 5, 4), groups=2),
    Case("groups of one input", "Conv", (32, 1, 3, 3), (1, 16, 5, 5), groups=16),
    Case("depthwise", "Conv", (32, 1, 3, 3), (1, 32, 5, 5), groups=32),
    Case("depthwise, few channels", "Conv", (6, 1, 3, 3), (1, 6, 5, 5), groups=6),
    Case("one dimension", "Conv", (16, 6, 3), (2, 6, 8)),
    Case("three dimensions", "Conv", (16, 3, 2, 2, 2), (1, 3, 4, 3, 3)),
    Case("Gemm", "Gemm", (20, 37), (3, 37)),
    Case("Gemm of one row", "Gemm", (32, 70), (1, 70)),
    Case("Gemm, long", "Gemm", (16, 1030), (2, 1030)),
    Case("MatMul", "MatMul", (20, 26), (5, 26)),
    Case("MatMul of one row", "MatMul", (32, 41), (1, 41)),
]


def model(case):
    """The layer between quantizers, all scales 1 but that of the output, as onnxruntime fuses it to one kernel."""
    outputs = case.weight[0]
    weight = case.integers()[0]
    columns = case.operator == "MatMul"
    constants = {
        "w": np.ascontiguousarray(weight.T) if columns else weight,
        "w_scale": np.ones(outputs, np.float32),
        "w_zero": np.zeros(outputs, np.int8),
        "one": np.float32(1),
        "zero": np.uint8(0),
        "step": np.float32(case.step),
        "middle": np.uint8(128),
    }
    attributes = {"Conv": {"group": case.groups}, "Gemm": {"transB": 1}, "MatMul": {}}[case.operator]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "one", "zero"], ["x_q"]),
        helper.make_node("DequantizeLinear", ["x_q", "one", "zero"], ["x_d"]),
        helper.make_node("DequantizeLinear", ["w", "w_scale", "w_zero"], ["w_d"], axis=int(columns)),
        helper.make_node(case.operator, ["x_d", "w_d"], ["sum"], **attributes),
        helper.make_node("QuantizeLinear", ["sum", "step", "middle"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, case.input)],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run(case):
    """The output of the layer in onnxruntime on this CPU."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model(case).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": case.integers()[1].astype(np.float32)})[0]


if __name__ == "__main__":
    np.savez_compressed(Path(sys.argv[1]), **{case.name: run(case) for case in CASES})
