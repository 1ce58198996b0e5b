"""The common parts of simple configs (``.cfg``).

``simple_config`` has the global fields and the blocks, ``names`` the lists of layer names and types, and
``algorithm_blocks`` the algorithm that a block chooses, with the position of every value.
"""
