"""What full configs (``.json``) have in common.

``reader`` reads JSON with the place of every key and value, ``blocks`` checks the objects inside.
A full config in memory, and how it is written, is in ``amct.config.full_config``.
"""
