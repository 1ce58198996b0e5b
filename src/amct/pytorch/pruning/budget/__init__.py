"""Pruning to a budget: how many channels each cell keeps, so that the least is lost for what the model may cost."""
