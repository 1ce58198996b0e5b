"""Quantization-aware training of Caffe models: the model that is trained, and the files of the trained one."""
