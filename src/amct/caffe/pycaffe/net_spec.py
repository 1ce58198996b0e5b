"""Defines a net in Python: ``n = NetSpec(); n.conv = layers.Convolution(n.data, num_output=4); n.to_proto()``.

``layers.<Type>(bottoms..., field=value...)`` creates a layer of any type; ``params.<Type>.<NAME>`` is an enum value of
that type's parameters. A field belongs to the type's own parameter message, or to the layer itself (``name``,
``param``, ``loss_weight``).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from amct.caffe.engine.messages import new_message
from amct.caffe.pycaffe.proto import caffe_pb2
from amct.errors import ArgumentTypeError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from amct.caffe.engine.messages import ProtoMessage

#: A value for a message field: a number, text, dict, or a list of these.
FieldValue: TypeAlias = Any


@cache
def _parameter_fields() -> dict[str, str]:
    """Layer type to the field of LayerParameter that holds its options: Convolution to convolution_param."""
    fields = new_message("LayerParameter").DESCRIPTOR.fields
    return {
        field.message_type.name.removesuffix("Parameter"): field.name
        for field in fields
        if field.name.endswith("_param") and field.message_type is not None
    }


def assign_proto(message: ProtoMessage, name: str, value: FieldValue) -> None:
    """Set a field from Python values: dicts fill messages, lists fill repeated fields, one value is a list of one.

    Raises:
        AttributeError: The message has no such field.
    """
    if name not in message.DESCRIPTOR.fields_by_name:
        raise AttributeError(
            f"{name}: {message.DESCRIPTOR.name} has no such field."
            f"{did_you_mean(name, message.DESCRIPTOR.fields_by_name)}"
        )
    target = getattr(message, name)
    if hasattr(target, "extend"):
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, dict):
                _fill(target.add(), item)
            else:
                target.append(item)
    elif isinstance(value, dict):
        _fill(target, value)
    else:
        setattr(message, name, value)


def _fill(message: ProtoMessage, values: dict[str, FieldValue]) -> None:
    for name, value in values.items():
        assign_proto(message, name, value)


class Top:
    """One output of a layer, to be passed to other layers."""

    def __init__(self, function: Function, index: int) -> None:
        self.fn, self.n = function, index

    def to_proto(self) -> ProtoMessage:
        """The net that ends here, with generated names."""
        return to_proto(self)


class Function:
    """A layer without a name: its type, inputs and fields."""

    def __init__(self, type_name: str, inputs: tuple[Top, ...], fields: dict[str, FieldValue]) -> None:
        for item in inputs:
            if not isinstance(item, Top):
                raise ArgumentTypeError(
                    f"{type_name} input {item!r} is not a Top (type is {type(item).__name__}): give results of "
                    "layers.<Type>(...)"
                )
        self.type_name, self.inputs, self.fields = type_name, inputs, dict(fields)
        self.ntop: int = self.fields.pop("ntop", 1)
        self.in_place: bool = self.fields.pop("in_place", False)
        self.tops = tuple(Top(self, index) for index in range(self.ntop))

    @property
    def params(self) -> dict[str, FieldValue]:
        """The fields, by pycaffe's name."""
        return self.fields

    def write(
        self, layers: OrderedDict[Function, ProtoMessage], names: dict[object, str], numbers: Counter[str]
    ) -> None:
        """Add this layer, after the layers it reads."""
        if self in layers:
            return
        bottoms = []
        for item in self.inputs:
            item.fn.write(layers, names, numbers)
            bottoms.append(layers[item.fn].top[item.n])
        layer = new_message("LayerParameter", type=self.type_name, bottom=bottoms)
        layer.top.extend(bottoms if self.in_place else [_name(top, self, names, numbers) for top in self.tops])
        layer.name = _name(self.tops[0] if self.tops else self, self, names, numbers)
        own = _parameter_fields().get(self.type_name)
        for field, value in self.fields.items():
            target = getattr(layer, own) if own else layer
            is_general = field.endswith("param") or field not in target.DESCRIPTOR.fields_by_name
            assign_proto(layer if is_general else target, field, value)
        layers[self] = layer

    def to_proto(self) -> ProtoMessage:
        """The net that ends here, with generated names."""
        return to_proto(self)


def _name(item: object, function: Function, names: dict[object, str], numbers: Counter[str]) -> str:
    if item not in names:
        numbers[function.type_name] += 1
        names[item] = f"{function.type_name}{numbers[function.type_name]}"
    return names[item]


def to_proto(*tops: Top | Function) -> ProtoMessage:
    """A NetParameter with the layers that lead to these tops, named by type and number."""
    return _net(tops, {})


def _net(tops: Iterable[Top | Function], names: dict[object, str]) -> ProtoMessage:
    written: OrderedDict[Function, ProtoMessage] = OrderedDict()
    numbers: Counter[str] = Counter()
    for top in tops:
        (top.fn if isinstance(top, Top) else top).write(written, names, numbers)
    return new_message("NetParameter", layer=list(written.values()))


class NetSpec:
    """A set of named tops: attributes set here become the names of blobs and layers."""

    tops: OrderedDict[str, Top | Function]

    def __init__(self) -> None:
        super().__setattr__("tops", OrderedDict())

    def __setattr__(self, name: str, value: Top | Function) -> None:
        self.tops[name] = value

    def __getattr__(self, name: str) -> Top | Function:
        try:
            return self.tops[name]
        except KeyError:
            raise AttributeError(f"the net has no top {name!r}.{did_you_mean(name, self.tops)}") from None

    def __setitem__(self, name: str, value: Top | Function) -> None:
        self.tops[name] = value

    def __getitem__(self, name: str) -> Top | Function:
        return self.tops[name]

    def __delitem__(self, name: str) -> None:
        del self.tops[name]

    def keys(self) -> list[str]:
        """The names, in the order of assignment."""
        return list(self.tops)

    def vals(self) -> list[Top | Function]:
        """The tops, in the order of assignment."""
        return list(self.tops.values())

    def update(self, other: NetSpec) -> None:
        """Add the tops of another net."""
        self.tops.update(other.tops)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tops)

    def to_proto(self) -> ProtoMessage:
        """The net as a NetParameter message."""
        return _net(self.tops.values(), {top: name for name, top in self.tops.items()})


class Layers:
    """``layers.<Type>(bottoms..., field=value...)``."""

    def __getattr__(self, type_name: str) -> Callable[..., Top | Function | tuple[Top, ...]]:
        def make(*inputs: Top, **fields: FieldValue) -> Top | Function | tuple[Top, ...]:
            function = Function(type_name, inputs, fields)
            if function.ntop == 0:
                return function
            return function.tops[0] if function.ntop == 1 else function.tops

        return make


class _Enums:
    """The enum values of one layer type's parameters."""

    def __init__(self, type_name: str) -> None:
        self._type_name = type_name

    def __getattr__(self, name: str) -> int:
        return int(getattr(getattr(caffe_pb2, f"{self._type_name}Parameter"), name))


class Parameters:
    """``params.<Type>.<NAME>``: enum values such as ``params.Pooling.MAX``."""

    def __getattr__(self, type_name: str) -> _Enums:
        return _Enums(type_name)


layers = Layers()
params = Parameters()
