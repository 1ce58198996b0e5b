"""A captured program as ONNX without torch's own exporter: one rule per operator."""
