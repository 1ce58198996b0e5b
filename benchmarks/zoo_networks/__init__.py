"""The networks of ``benchmarks/zoo.py``: how each is built, what it is fed with, and what is measured."""
