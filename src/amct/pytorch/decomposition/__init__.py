"""Layers with low-rank weights as two smaller layers each."""
