"""What pruning measures on data: inputs of layers, the same in all processes of ``torch.distributed``."""
