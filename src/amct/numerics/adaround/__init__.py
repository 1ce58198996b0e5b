"""AdaRound: learn for every weight whether to round it up or down."""
