"""Which settings suit which layer: scores of single layers, on which a diagnosis or a search can decide."""
