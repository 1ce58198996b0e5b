"""AdaRound over a whole torch model, layer after layer."""
