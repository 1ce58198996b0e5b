"""Calibration does not keep the data: from some batches on, the peak memory of a process stays where it is.

Eight batches beside twenty. One batch beside twenty is not within 2 % (measured here: 432 MB, then 448 MB from eight
batches on): ``benchmarks/ptq_caffe.py`` shows that on real nets. Twelve batches more, if kept, would be 50 MB.
"""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import json, resource, sys
import numpy as np, torch
from amct.caffe import quantize
from amct.caffe.engine.net import Net

torch.set_num_threads(1)
folder, batch_num = sys.argv[1], int(sys.argv[2])
files = f"{folder}/net.prototxt", f"{folder}/net.caffemodel"
open(files[0], "w").write('''
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 600 dim: 600 } } }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "msra" } } }
layer { name: "conv2" type: "Convolution" bottom: "conv1" top: "conv2"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "msra" } } }
''')
Net.from_file(files[0]).save_weights(files[1])
open(f"{folder}/quant.cfg", "w").write(f"batch_num: {batch_num}")
data = (np.random.default_rng(n).standard_normal((1, 3, 600, 600), np.float32) for n in range(batch_num))
model = quantize(*files, data, f"{folder}/quant.cfg")
assert model.layers == ("conv1", "conv2")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak(folder, batch_num):
    command = [sys.executable, "-c", CHILD, str(folder), str(batch_num)]
    return int(subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout)


def test_peak_memory_stops_growing(tmp_path):
    few, many = peak(tmp_path, 8), peak(tmp_path, 20)
    assert many <= 1.02 * few
