"""Counts of activation values in bounded memory: exact while they are few, then a histogram of float bits."""
