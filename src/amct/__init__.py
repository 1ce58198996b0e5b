"""Model compression for PyTorch, Caffe and ONNX networks, with the files and names of AMCT.

Importing this package imports no torch and writes nothing; use ``amct.pytorch`` or ``amct.caffe``.
"""

__version__ = "0.2.0"
