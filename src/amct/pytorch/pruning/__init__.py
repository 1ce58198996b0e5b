"""Pruning of PyTorch models: removing channels, and 2:4 sparsity."""
