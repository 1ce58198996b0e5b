"""Solvers: train a net from a solver prototxt, as Caffe does.

``definition.py`` reads the prototxt and finds the nets, ``rules.py`` has the update rules and learning rates,
``solver.py`` the loop, ``snapshot.py`` the files. A new solver type is one ``Rule`` in ``rules.py``.
"""
