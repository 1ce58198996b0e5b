"""The configs of post-training quantization of Caffe models.

The JSON has the guide's keys in the guide's order; layers stand in the order of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from amct.config.blocks import AlgorithmBlock, known_members
from amct.config.checks import check_settings
from amct.config.dialect import QuantBlock, label
from amct.config.layers import CAFFE_ACTIVATION_BITS, CAFFE_TYPES, CAFFE_WEIGHT_BITS
from amct.config.ptq.dialect import DATA_KEY, ROUNDING_KEYS, WEIGHT_KEY, PtqDialect
from amct.config.registry import CAFFE_WEIGHT
from amct.config.simple_config import Level, Origin
from amct.numerics.settings import (
    AtLeastOne,
    BatchNormUpdate,
    CheckedSettings,
    Names,
    Switch,
    Version,
    WeightRounding,
    WeightScale,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from amct.config.checks import ProblemList
    from amct.config.json_reader import JsonNode
    from amct.config.layers import LayerInfo, LayerList
    from amct.config.ptq.dialect import Note, Offset
    from amct.config.simple_config import Choice, LayerBlock, SimpleConfig
    from amct.schema import TextMessage

UPDATE_KEY = "bn_update_config"
JOINT_KEY = "joint_quant"
UPDATE_KEYS = frozenset({"update_bn", UPDATE_KEY})


@dataclass(frozen=True, kw_only=True)
class _CaffeGlobals(CheckedSettings):
    version: Version = 1
    batch_num: AtLeastOne = 1
    activation_offset: Switch = True
    joint_quant: Switch = False  # true is refused; never written
    do_fusion: Switch = True
    skip_fusion_layers: Names = ()
    update_bn: Switch = False
    bn_update_config: BatchNormUpdate = field(default_factory=BatchNormUpdate)
    weight_rounding: WeightRounding = "error_cancelling"
    weight_scale: WeightScale = "full_range"
    bias_correction: Switch = False


class CaffePtq(PtqDialect):
    """Caffe's layer types, with SNQ, several inputs per layer, and refreshed BatchNorm statistics."""

    name = "caffe"
    message = "AMCTCaffeProto.AMCTConfig"
    schema = "caffe_config"
    types = CAFFE_TYPES
    weight = CAFFE_WEIGHT
    globals = _CaffeGlobals
    optional_globals = frozenset({JOINT_KEY, *UPDATE_KEYS, *ROUNDING_KEYS})
    part_name = "layer"
    activation_bits = CAFFE_ACTIVATION_BITS
    balances = False
    weight_rounding = "error_cancelling"
    weight_scale = "full_range"

    def with_own_fields(self, simple: SimpleConfig, message: TextMessage, problems: ProblemList) -> SimpleConfig:
        """Add the fields of refreshing BatchNorm statistics, which are written only when the file has them."""
        given = [key for key in ("update_bn", UPDATE_KEY) if message.has(key)]
        if not given:
            return simple
        origins = {key: Origin(Level.GLOBAL, message.where(key)) for key in given if key != UPDATE_KEY}
        values: dict[str, Any] = {}
        block: TextMessage | None = message.get(UPDATE_KEY)
        if block is not None:
            values = {item.name: block.get(item.name) for item in fields(BatchNormUpdate) if block.has(item.name)}
            origins |= {f"{UPDATE_KEY}.{name}": Origin(Level.GLOBAL, block.where(name)) for name in values}
            check_settings(BatchNormUpdate, values, lambda path: block.where(str(path[0])), problems, block=UPDATE_KEY)
            if not message.get("update_bn", False):
                where = message.where(UPDATE_KEY)
                problems.warn(f"{UPDATE_KEY} has no effect while update_bn is not true", where)
        settings = {item.name: values.get(item.name, item.default) for item in fields(BatchNormUpdate)}
        own = {"update_bn": message.get("update_bn", False), UPDATE_KEY: settings}
        return replace(simple, fields={**simple.fields, **own}, origins={**simple.origins, **origins})

    def illegal(self, block: QuantBlock) -> Iterator[tuple[str, str]]:
        """Bit widths that no activation, or no weight of the algorithm, can have."""
        if (bits := block.activation.given.get("num_bits", 8)) not in CAFFE_ACTIVATION_BITS:
            yield f"{DATA_KEY}.num_bits", f"activations can have 8 to 16 bits, got {bits}"
        algorithm = block.weight.algorithm.name
        only = CAFFE_WEIGHT_BITS[algorithm]
        if (bits := block.weight.given.get("num_bits", only)) != only:
            yield f"{WEIGHT_KEY}.num_bits", f"{algorithm} gives weights {only} bits, got {bits}"

    def unsupported(self, layer: LayerInfo, block: QuantBlock) -> Iterator[tuple[str, str]]:
        """Scales per channel and SNQ where this layer or type cannot have them."""
        if block.weight.given.get("channel_wise") is True and self.is_per_tensor(layer):
            what = "AVE pooling" if layer.average_pooling else layer.type
            yield (
                f"{WEIGHT_KEY}.channel_wise",
                f"channel_wise must be false, {what} has one scale for all weights",
            )
        if _lacks_snq(layer, block.weight):
            allowed = ", ".join(name for name, item in self.types.items() if item.snq)
            yield WEIGHT_KEY, f"snq_quantize is only for {allowed}. Use arq_quantize."

    def check_override(self, choice: Choice, layer: LayerInfo, problems: ProblemList) -> None:
        """Report what is unsupported; warn of an override without effect."""
        super().check_override(choice, layer, problems)
        block, capability = self.read_choice(choice).weight, self.types[layer.type]
        if block.position is not None and not capability.weights and not layer.average_pooling:
            what = f"{block.algorithm.name} has no effect, {layer.type} has no weights to quantize"
            problems.warn(f"{label(layer)}: {what}", block.position)
        if not capability.on_by_default:
            message = (
                f"{label(layer)}: {layer.type} is not quantized by default, so the override acts only after"
                " quant_enable is set to true in the JSON config"
            )
            problems.warn(message, choice.origin.position)

    def is_per_tensor(self, layer: LayerInfo) -> bool:
        """Whether a layer can only be quantized with one scale for all channels."""
        capability = self.types[layer.type]
        return layer.average_pooling or (capability.weights and not capability.channel_wise)

    def fitted_weight(self, layer: LayerInfo, block: AlgorithmBlock, note: Note) -> AlgorithmBlock | None:
        """ARQ for a layer that SNQ cannot quantize; no block for a layer without weights."""
        if not self.types[layer.type].weights:
            return None
        if _lacks_snq(layer, block):
            note("snq_quantize does not apply to these layers, arq_quantize is used", block.position)
            return AlgorithmBlock(algorithm=self.weight[0], origin=block.origin)
        return block

    def write_inputs(
        self, target: LayerBlock, inputs: Sequence[AlgorithmBlock], offset: Offset, changed: Mapping[str, Any]
    ) -> None:
        """A block, or a list with a block for each input; ``with_offset`` is written only where it is given."""
        written = []
        for index, block in enumerate(inputs):
            prefix = f"{DATA_KEY}[{index}]" if len(inputs) > 1 else DATA_KEY
            written.append(block.write(prefix, "act_algo", target.origins, changed))
            if "with_offset" not in block.given:
                key = f"{prefix}.with_offset"
                target.implied[key], target.origins[key] = offset
        target.data[DATA_KEY] = written if len(inputs) > 1 else written[0]

    def global_nodes(
        self, nodes: Mapping[str, JsonNode], root: JsonNode, model: LayerList, problems: ProblemList
    ) -> Mapping[str, JsonNode]:
        """Report unknown keys of ``bn_update_config`` and a true ``joint_quant`` too."""
        if JOINT_KEY in nodes and nodes[JOINT_KEY].value is True:
            problems.add(
                "joint_quant must be false: the inputs of an Eltwise are not quantized jointly, each has factors of "
                "its own. Set it to false or remove it.",
                nodes[JOINT_KEY].position,
            )
        nodes, update = super().global_nodes(nodes, root, model, problems), nodes.get(UPDATE_KEY)
        if update is None or not update.is_object:
            return nodes
        known = known_members(update, [item.name for item in fields(BatchNormUpdate)], UPDATE_KEY, problems)
        return {**nodes, UPDATE_KEY: replace(update, value=known)}

    def written_globals(self, settings: CheckedSettings, given: Collection[str]) -> dict[str, Any]:
        """The global fields as they are written: both keys of refreshing BatchNorm statistics, or none."""
        both = UPDATE_KEYS if UPDATE_KEYS & set(given) else frozenset()
        return super().written_globals(settings, (set(given) | both) - {JOINT_KEY})

    def warns_of_weight_block(self, layer: LayerInfo) -> bool:
        """Not of one of average pooling, which the guide has."""
        return super().warns_of_weight_block(layer) and not layer.average_pooling

    def read_inputs(
        self, layer: LayerInfo, node: JsonNode | None, problems: ProblemList
    ) -> list[tuple[str, AlgorithmBlock]]:
        """The activation blocks, one for each input: from one object for all, or from a list."""
        if node is None or not node.is_list:
            return super().read_inputs(layer, node, problems) * layer.inputs
        name, nodes = f"{layer.name}.{DATA_KEY}", node.value
        if len(nodes) not in (1, layer.inputs):
            problems.add(
                f"{name} has {len(nodes)} entries, but the layer has {layer.inputs} inputs."
                " Give one entry for each, or one for all.",
                node.position,
            )
            return super().read_inputs(layer, None, problems) * layer.inputs
        names = [f"{name}[{index}]" for index in range(len(nodes))]
        blocks = [
            (each, self.read_block(DATA_KEY, item, each, problems)) for each, item in zip(names, nodes, strict=True)
        ]
        return blocks if len(blocks) == layer.inputs else blocks * layer.inputs


def _lacks_snq(layer: LayerInfo, block: AlgorithmBlock) -> bool:
    capability = CAFFE_TYPES[layer.type]
    return block.algorithm.name == "snq_quantize" and capability.weights and not capability.snq


CAFFE = CaffePtq()
