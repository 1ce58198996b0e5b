"""Layers that read data into a net, and one that writes data.

``prefetch.py`` is the base of layers that read ahead in a background thread, ``transform.py`` applies
``transform_param``; the file formats are in ``amct.data``.
"""
