"""Selects the layers of a net: include and exclude rules by phase, level and stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct.errors import ModelError

if TYPE_CHECKING:
    from amct.caffe.engine.messages import ProtoMessage


def meets_rule(state: ProtoMessage, rule: ProtoMessage) -> bool:
    """Whether a NetState satisfies every condition of one NetStateRule."""
    if rule.HasField("phase") and rule.phase != state.phase:
        return False
    if rule.HasField("min_level") and state.level < rule.min_level:
        return False
    if rule.HasField("max_level") and state.level > rule.max_level:
        return False
    stages = set(state.stage)
    return all(stage in stages for stage in rule.stage) and not any(stage in stages for stage in rule.not_stage)


def is_included(layer: ProtoMessage, state: ProtoMessage) -> bool:
    """Whether a layer is part of the net in this state.

    Raises:
        ModelError: The layer has both include and exclude rules.
    """
    if not layer.include and not layer.exclude:
        return True
    if layer.include and layer.exclude:
        raise ModelError(
            f'layer "{layer.name}": Specify either include rules or exclude rules; not both. Remove one of the two.'
        )
    if layer.include:
        return any(meets_rule(state, rule) for rule in layer.include)
    return not any(meets_rule(state, rule) for rule in layer.exclude)


def filter_net(net: ProtoMessage) -> ProtoMessage:
    """Remove the layers that the net's ``state`` does not include, in place, and return the net.

    Raises:
        ModelError: A layer has both include and exclude rules.
    """
    dropped = [index for index, layer in enumerate(net.layer) if not is_included(layer, net.state)]
    for index in reversed(dropped):
        del net.layer[index]
    return net
