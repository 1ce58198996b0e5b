"""Pure tensor maths: no graphs, no files, no config objects. Import the module you need; this one imports nothing.

Weights: ``arq`` (uniform), ``snq`` (16 values), ``adaround``, ``dmq`` (balancing), ``fold`` (batch norm and the like).
Activations: ``ifmr``, ``hfmg``, ``min_max``, all of them observers (``observer``).
Both: ``affine`` says what scale and offset mean, ``integer`` computes with the result.
"""
