"""Pure tensor maths: no graphs, no files. Import the submodules directly; this file imports none.

Weights: ``arq`` (uniform), ``snq`` (16 values), ``adaround``, ``dmq`` (balancing), ``fold`` (batch norm, Scale, Bias).
Activations: ``ifmr``, ``hfmg``, ``min_max``, all of them observers (``observer``).
``settings`` has the settings of every algorithm, without torch.
Both: ``affine`` defines scale and offset, ``integer`` computes with the quantized integers.
"""
