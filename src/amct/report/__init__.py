"""The quantization report: comparison of the float and the quantized model layer by layer, as one HTML file.

``content`` has the data of a report; ``page`` renders it as HTML; ``measuring``, ``similarity`` and ``activations``
accumulate measurements over batches; ``filling`` makes the content from them. The package is framework-independent.
"""
