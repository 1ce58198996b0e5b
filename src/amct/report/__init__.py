"""What quantization did to a model: layer by layer comparison, and a page that shows it.

``content`` is what a page shows, as plain data; ``page`` makes one HTML file of it; ``compare`` and ``activations`` sum
up what two runs of a model show. Nothing here knows which framework the model comes from.
"""
