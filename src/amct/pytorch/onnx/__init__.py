"""A folded torch model as float ONNX, with each quantizable layer bound to its node."""
