"""From a config file to a plan.

The road of a config: a simple config (``.cfg``) is expanded for a model into a full config (JSON), and a full config
becomes a ``Plan`` with one immutable ``LayerPlan`` per layer.

Shared by all kinds of config: ``json_reader`` and ``json_writer``, ``problems`` (all mistakes reported together),
``checks`` (a block of a file becomes a settings object), ``settings`` and ``registry`` (the algorithms), ``layers``
(what is known of a model), ``names``, ``precedence``, ``simple_config`` and ``algorithm_blocks`` (the parts of a simple
config), ``full_config`` (the JSON with the origin of every value, and ``explain``), ``plan``.

The kinds: ``ptq_pytorch``, ``kv_cache``, ``ptq_caffe``; for retraining ``qat_pytorch``, ``qat_caffe``,
``compress_pytorch`` (pruning, alone or with quantization) and ``prune_search`` (the search for pruning ratios). What
the retraining kinds share: ``retrain_settings``, ``retrain_simple``, ``retrain_plan``, ``qat_dialect``, ``qat_expand``,
``qat_json``, ``pruners``, ``prune_expand``.
"""
