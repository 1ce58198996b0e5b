"""What retraining (quantization-aware training, pruning) has in common in every front door."""
