"""The common parts of full configs (``.json``).

``reader`` reads JSON with the position of every key and value, ``blocks`` checks the objects inside. The in-memory form
of a full config, and how it is written, is in ``amct.config.full_config``.
"""
