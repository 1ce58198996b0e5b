"""What the fields of the simple configs mean, and the legal values that no annotation tells; for the config reference.

Types, defaults and most legal ranges come from the schema and from ``amct.config``. What stands here is what a person
has to say: a sentence for each field. A field without one stops ``build_config_reference.py``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from amct.config.layers import (
    ARQ_BITS,
    CAFFE_ACTIVATION_BITS,
    CAFFE_WEIGHT_BITS,
    KV_CACHE_TYPES,
    MIGRATION_RANGE,
    PTQ_TYPES,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_LAYER = "the name of a layer of the model"
_TYPE = "a layer type of [the table](#layer-types)"
_CHANNEL_DEFAULT = "true where the layer type can have it"
_OFFSET_DEFAULT = "`activation_offset`"
_COMMON_OFFSET_DEFAULT = f"that of `common_config` if it has the same algorithm, else {_OFFSET_DEFAULT}"
_ASYMMETRIC = "true: the activations of these layers have an offset; false: their range is symmetric about 0."
_HALF = "If an override has only the other one, built-in defaults apply here, not the global block; a warning says so."
_CLIP_DEFAULT = "found by IFMR"
_SEARCH = "0 < `search_range_start` < `search_range_end`"
_BETA = "`beta_range_start` > `beta_range_end` > 0"
_ODD_TYPES = ", ".join(name for name, capability in PTQ_TYPES.items() if capability.odd_bits)
_NO_OFFSET_TYPES = ", ".join(name for name, capability in PTQ_TYPES.items() if not capability.asymmetric)
_CHANNEL_WISE = (
    "A scale for every output channel of the weights. In a common block it is left out where a layer type cannot have "
    "it, with a warning; for that very layer or type it is an error."
)

#: By field, or by ``Message.field`` or ``kind/field`` where the same name has another meaning.
MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        # the whole file
        "batch_num": "How many batches calibration takes. The record is complete after so many forwards.",
        "activation_offset": "Asymmetric activations (with an offset) where no block says otherwise.",
        "skip_layers": "Layers that stay float.",
        "skip_layer_types": "All layers of these types stay float.",
        "do_fusion": "Fold BatchNorm (Caffe: also Scale and Bias) into the layer before it.",
        "skip_fusion_layers": "Layers whose BatchNorm is not folded.",
        "fakequant_precision_mode": "FORCE_FP16_QUANT rounds activation scales to what half precision can hold.",
        "weight_rounding": "How uniform weights are rounded; in one call and the command line errors cancel.",
        "bias_correction": "Biases make up for the mean error of rounding; one call and the command line do so.",
        "common_config": "For every layer that no override names.",
        "override_layer_types": "For all layers of a type; goes before `common_config`.",
        "override_layer_configs": "For one layer; goes before everything else.",
        "update_bn": "Refresh the statistics of BatchNorm layers after the weights were quantized (for SNQ).",
        "bn_update_config": "How they are refreshed; without effect unless `update_bn` is true.",
        "bn_update_iterations": "Forwards until the new statistics are written.",
        "bn_moving_average_fraction": "How much of the old statistics each forward keeps, where a layer does not say.",
        "bn_dump_dir": "The folder for the new statistics.",
        # overrides
        "layer_type": "Which type.",
        "layer_name": "Which layer.",
        "calibration_config": "Replaces the common block as a whole: what is left out here takes its default.",
        # algorithms of post-training quantization
        "arq_quantize": "Weights by ARQ: the largest absolute value decides the scale.",
        "ada_quantize": "Weights by AdaRound: learns for each weight whether to round up or down.",
        "snq_quantize": "Weights by SNQ: non-uniform, clustered to 16 values.",
        "ifmr_quantize": "Activations by IFMR: searches the clip range around a percentile.",
        "hfmg_quantize": "Activations by HFMG: searches the clip range on a histogram.",
        "dmq_balancer": "DMQ: moves difficulty from activations to weights before anything is quantized.",
        "channel_wise": _CHANNEL_WISE,
        "quant_bits": "Bits of the weights. 6 and 7 in a common block only touch the types that can have them.",
        "ARQuantize.num_bits": "Bits of the weights.",
        "FMRQuantize.num_bits": (
            "Bits of the activations. 9 to 16: factors for that width, stored as 16 bits on the chip. The guide "
            "advises 12 and warns of overflow at 16."
        ),
        "num_iteration": "Steps of learning.",
        "reg_param": "Weight of the term that pushes every weight to one of its two neighbours.",
        "beta_range_start": "Steepness of that term at the beginning.",
        "beta_range_end": "Steepness of that term at the end.",
        "warm_start": "Share of the steps before that term sets in.",
        "migration_strength": "How much difficulty moves to the weights; larger outliers want a smaller value.",
        "search_range_start": "Where the search begins, as a multiple of the value at the percentile.",
        "search_range_end": "Where it ends.",
        "search_step": "Its step. Smaller finds more and takes longer.",
        "max_percentile": "The share of the values below the upper clip value that the search starts from; 1: all.",
        "min_percentile": "The same for the lower clip value.",
        "asymmetric": f"{_ASYMMETRIC} {_NO_OFFSET_TYPES} never has one: an override that asks for it is an error.",
        "kv-cache/asymmetric": _ASYMMETRIC,
        "FMRQuantize.dst_type": "Integer type of the activations.",
        "HFMGQuantize.dst_type": "Integer type of the activations.",
        "num_of_bins": "Bins of the histogram.",
        "max_iteration": "Steps of clustering at most. More may be better and takes longer.",
        "min_distance": "Clustering stops when the centres move less than this.",
        "init_algo": "Where the 16 values start from; `d2sampling` is k-means++.",
        # retraining
        "AMCTRetrainConfig.batch_num": "How many batches find the first clip values.",
        "AMCTRetrainConfig.skip_layers": "Layers that are neither quantized nor pruned; joined with the lists below.",
        "AMCTRetrainConfig.skip_layer_types": "The same for all layers of these types.",
        "AMCTRetrainConfig.override_layer_types": "For all layers of a type; goes before the global blocks.",
        "retrain-caffe/skip_layers": "Layers that are not quantized; joined with `quant_skip_layers`.",
        "retrain-caffe/quant_skip_layers": "Layers that are not quantized.",
        "retrain_data_quant_config": "How activations are quantized.",
        "retrain_weight_quant_config": "How weights are quantized.",
        **{
            f"{message}.retrain_{half}_quant_config": f"How {what} are quantized. {_HALF}"
            for message in ("RetrainOverrideLayer", "RetrainOverrideLayerType")
            for half, what in (("data", "activations"), ("weight", "weights"))
        },
        "quant_skip_layers": "Layers that are not quantized (they may be pruned).",
        "quant_skip_types": "The same for all layers of these types.",
        "prune_config": "How layers are pruned.",
        "regular_prune_skip_layers": "Layers that are not pruned (they may be quantized).",
        "regular_prune_skip_types": "The same for all layers of these types.",
        "ulq_quantize": "Activations by ULQ: learns where to clip.",
        "clip_max_min": "Where learning starts. Without it IFMR finds the start from the first batches.",
        "clip_max": "The upper clip value at the start.",
        "clip_min": "The lower clip value at the start.",
        "fixed_min": "Keep the lower clip value at 0.",
        "fixed_clip": "Keep the clips that are given; false: learning starts there. Not in AMCT.",
        "dst_type": "Integer type.",
        "ActULQquantize.num_bits": "Bits of the activations; 9 to 16: factors for that width, stored as 16 bits.",
        "ARQRetrain.num_bits": "Bits of the weights.",
        "arq_retrain": "Weights by ARQ at every step.",
        "ulq_retrain": "Weights by ULQ: learns their scale.",
        "filter_pruner": "Take output channels away.",
        "n_out_of_m_pruner": "Keep some weights out of every few.",
        "balanced_l2_norm_filter_prune": "Channels of the smallest L2 norm go.",
        "l1_selective_prune": "The weights of the smallest absolute value go.",
        "prune_ratio": "Share of the channels that are taken away.",
        "ascend_optimized": "Leave a number of channels that is a multiple of 16.",
        "n_out_of_m_type": "How many of how many are kept: M4N2 keeps 2 of every 4.",
        "update_freq": "Every how many batches the choice is made again; 0: only at the first.",
        # distillation
        "AMCTDistillConfig.batch_num": "How many batches find the first clip values.",
        "group_size": "How many layers that read each other learn together, where no group says otherwise.",
        "data_dump": "Keep what is computed of each batch in files of a folder that is removed, not in memory.",
        "distill_group": "A group of layers that learn together: each but the last is read by the next one only.",
        "start_layer_name": "Its first layer.",
        "end_layer_name": "Its last layer.",
        "distill_data_quant_config": "How activations are quantized; the same `dst_type` as for weights.",
        "distill_weight_quant_config": "How weights are quantized.",
        "distill_override_layers": "For one layer; goes before all but the skip lists.",
        "distill_override_layer_types": "For all layers of a type; goes before the global blocks.",
        "distill/quant_skip_layers": "Layers that stay float, also if an override names them.",
        "quant_skip_layer_types": "All layers of these types stay float.",
        "arq_distill": "Weights by ARQ at every step.",
        "ulq_distill": "Weights by ULQ: learns their scale.",
        # kv-cache
        "kv_cache_quant_config": "Which layers' outputs are quantized for the cache, and how.",
        "quant_layers": "The layers.",
        "CommonCalibrationConfig.calibration_config": "How their outputs are quantized.",
        "override_layers_configs": "For one layer, which need not be in `quant_layers`.",
        "kv_data_quant_config": "How its output is quantized.",
        "quant_granularity": "One scale for the whole output or one for each channel.",
    }
)

#: Legal values without an annotation, by ``Message.field`` or field; with the prefix ``kind/`` for one config only.
LEGAL: Mapping[str, str] = MappingProxyType(
    {
        "batch_num": "≥ 1",
        "skip_layers": _LAYER,
        "skip_layer_types": _TYPE,
        "skip_fusion_layers": _LAYER,
        "quant_skip_layers": _LAYER,
        "quant_skip_types": _TYPE,
        "regular_prune_skip_layers": _LAYER,
        "regular_prune_skip_types": _TYPE,
        "layer_name": _LAYER,
        "layer_type": _TYPE,
        "kv-cache/layer_name": f"a {KV_CACHE_TYPES[0]} layer of the model",
        "quant_layers": f"{KV_CACHE_TYPES[0]} layers of the model",
        "search_range_start": _SEARCH,
        "search_range_end": _SEARCH,
        "search_step": "> 0, ≤ `search_range_end` − `search_range_start`, at most 100 000 steps",
        "beta_range_start": _BETA,
        "beta_range_end": _BETA,
        "migration_strength": f"≥ {MIGRATION_RANGE[0]}, ≤ {MIGRATION_RANGE[1]}",
        "quant_bits": f"{', '.join(map(str, sorted(ARQ_BITS)))}; 6 and 7 for {_ODD_TYPES} only",
        "ptq-caffe/ARQuantize.num_bits": str(CAFFE_WEIGHT_BITS["arq_quantize"]),
        "ptq-caffe/FMRQuantize.num_bits": f"≥ {CAFFE_ACTIVATION_BITS.start}, ≤ {CAFFE_ACTIVATION_BITS.stop - 1}",
        "retrain-caffe/ActULQquantize.dst_type": "INT8, INT16; says the same as `num_bits`, give one of them",
        "retrain-caffe/ARQRetrain.dst_type": "INT8; says the same as `num_bits`",
    }
)

#: Defaults that depend on something else.
DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        "channel_wise": _CHANNEL_DEFAULT,
        "asymmetric": _COMMON_OFFSET_DEFAULT,
        "kv-cache/asymmetric": _OFFSET_DEFAULT,
        "quant_bits": "8",
        "clip_max_min": _CLIP_DEFAULT,
        "fixed_min": "true behind a ReLU if no clip is given, else false",
        "fixed_clip": "true",
    }
)
