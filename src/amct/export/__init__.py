"""The ONNX exporters: from a float model, layer bindings and quantization factors to files.

They do not depend on any front door: a model is an ONNX ``ModelProto`` with BatchNorm folded, its layers are
``LayerBinding`` objects and their parameters ``LayerQParams``.
"""
