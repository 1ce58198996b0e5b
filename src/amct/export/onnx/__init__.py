"""ONNX graphs as exporters see them: who makes and reads a tensor, which node computes a layer."""
