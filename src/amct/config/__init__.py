"""From a config file or a ``QuantConfig`` to a plan with one immutable ``LayerPlan`` per layer.

``text`` reads simple configs (``.cfg``), ``json`` full configs; ``ptq``, ``qat``, ``prune`` are the kinds of configs.
``dialect`` has the steps that all kinds share, ``settings`` the settings of every algorithm, ``registry`` their names.
"""
