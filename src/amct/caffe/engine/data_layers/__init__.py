"""Layers that bring data into a net, and one that writes it out.

``prefetch.py`` is the base of those that read ahead in the background, ``transform.py`` is ``transform_param``; the
reading itself is in ``amct.data``.
"""
