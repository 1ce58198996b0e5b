"""Configs of post-training quantization.

For each dialect: ``*_types`` (what layer types can do), the expansion of a simple config, ``*_json`` (JSON to plan).
``quant_config`` is the Python form and makes a plan from any form; ``kv_cache`` is the config of kv-cache quantization.
"""
