"""ONNX graphs for exporters: producers and consumers of tensors, and the nodes of layers."""
