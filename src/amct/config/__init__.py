"""From a config file to a plan.

A simple config (``.cfg``) is expanded for a model into a full config (JSON), and a full config becomes a plan with one
immutable entry per layer. ``dialect`` has the steps that all kinds of config share; ``ptq``, ``qat`` and ``prune`` are
the kinds, ``text`` and ``json`` read the two file formats, ``registry`` has the algorithms that a config can name.
"""
