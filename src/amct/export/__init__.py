"""The ONNX back doors: from a float model, layer bindings and quantization factors to files.

They know no front door: a model comes in as an ONNX ``ModelProto`` with BatchNorm folded, its layers as
``LayerBinding`` and their factors as ``LayerFactors``.
"""
