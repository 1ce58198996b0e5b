"""Post-training quantization of Caffe models: folding, calibration layers, integer weights and output files."""
