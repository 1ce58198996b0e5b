"""The layer types: one file per type or per small family.

The registry imports every module of this package, so that no list of them is needed.
"""
