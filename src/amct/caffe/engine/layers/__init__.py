"""The layer types, a file for each or for a small family.

The registry imports every module here; none needs listing.
"""
