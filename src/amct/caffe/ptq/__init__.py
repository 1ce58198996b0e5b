"""Post-training quantization of Caffe models: folding, calibration layers, integer weights, the files of the guide."""
