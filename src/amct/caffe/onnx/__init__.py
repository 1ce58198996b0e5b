"""Caffe nets as ONNX models: float, and quantized as QDQ."""
