"""The Caffe front door: an engine that runs and trains Caffe models, pycaffe's face, and quantization on top of it."""
