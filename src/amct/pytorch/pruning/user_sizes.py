"""Sizes in the user's code that channels depend on: computed from tensors, attributes of modules, or literal.

A size that is computed follows the channels by itself. One that a module keeps in an attribute (``self.num_heads``)
follows if the attribute is changed with the channels, which a record notes like any other cut. A literal one keeps its
channels. Which of them a size is cannot be seen in a captured program; it is tried, in this order, on the cut model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

from amct.pytorch.pruning.cutting import PARAMETER, node_type

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from amct.pytorch.pruning.channels import ChannelMap, Labels

_MOST_NAMES = 4
"""Of so many attributes with the value of a size, any may be changed together."""


@dataclass(frozen=True)
class UserSizes:
    """What is known of the sizes in the user's code, by line (``file:line``).

    Attributes:
        literal: Lines with a size that does not follow.
        whole: Literal lines whose size is that of another tensor: the module keeps all that it reads and makes.
        attributes: The names of attributes of the calling modules that are changed with the channels of a line.
    """

    literal: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def after_fault(self, places: Collection[str], channel_map: ChannelMap) -> UserSizes:
        """What is tried next if a model that was cut as known so far has a wrong size in one of some lines."""
        literal, attributes = set(self.literal), dict(self.attributes)
        following = {place: _next(channel_map, place, attributes.get(place, ())) for place in sorted(places)}
        # Another of several attributes with the same value explains a fault that may be anywhere.
        others = [place for place in attributes if following.get(place)]
        for place in others[:1] or following:
            attributes.pop(place, None)
            if names := following[place]:
                attributes[place] = names
            else:
                literal.add(place)
        return replace(self, literal=frozenset(literal), attributes=attributes)

    def changed(self, channel_map: ChannelMap) -> Iterator[tuple[str, Labels]]:
        """Every attribute that is changed, as the path of its module with its name, and the channels it counts."""
        for place, names in self.attributes.items():
            for path, labels in channel_map.followed.get(place, ()):
                for name in set(names) & _counting(channel_map, path, labels):
                    yield f"{path}.{name}" if path else name, labels


def _next(channel_map: ChannelMap, place: str, tried: tuple[str, ...]) -> tuple[str, ...]:
    """Which attributes may be changed for a line instead of others: first each alone, then several; () at the end."""
    found = set[str]()
    for path, labels in channel_map.followed.get(place, ()):
        found |= _counting(channel_map, path, labels)
    names = sorted(found)[:_MOST_NAMES]
    choices = [chosen for count in range(len(names) + 1) for chosen in combinations(names, count)]
    return dict(pairwise([*choices, ()])).get(tried, ())


def _counting(channel_map: ChannelMap, path: str, labels: Labels) -> set[str]:
    """The attributes of a module that have the number of some channels, if it is not cut as a layer."""
    module = channel_map.modules.get(path)
    if module is None or node_type(module) != PARAMETER:
        return set()
    return {name for name, value in vars(module).items() if type(value) is int and value == len(labels)}
