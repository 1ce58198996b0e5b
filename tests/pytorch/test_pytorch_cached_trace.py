"""A cached trace is used again for the same model, and never for a model of which anything has changed."""

from __future__ import annotations

import threading
from collections import deque, namedtuple
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from amct.pytorch.capture import cached_trace as caching
from amct.pytorch.capture.cached_trace import NotComparableError, cached_trace, fingerprint_of

EXAMPLE = torch.ones(2, 4)


class Branch(Enum):
    first = 1
    second = 2


@dataclass
class Settings:
    second: bool = False
    inner: dict = field(default_factory=dict)


@dataclass(slots=True)
class SlottedSettings:
    second: bool = False


class Slotted:
    __slots__ = ("second",)

    def __init__(self):
        self.second = False


class ClassSettings:
    second = False


Pair = namedtuple("Pair", "a b")


class Chosen(nn.Module):
    """Runs ``second`` or ``first``, as ``choose`` says of an attribute."""

    def __init__(self, attribute, choose):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)
        self.attribute, self.choose = attribute, choose

    def forward(self, x):
        return self.second(x) if self.choose(self.attribute) else self.first(x)


def set_attribute(owner, value):
    owner.second = value


def closure_over(state):
    return lambda: state["second"]


def counter():
    second = False

    def switch(new=None):
        nonlocal second
        second = second if new is None else new
        return second

    return switch


CASES = {
    "number": (0, lambda a: a, lambda m: setattr(m, "attribute", 1)),
    "list": ([0], lambda a: a[0], lambda m: m.attribute.append(m.attribute.pop() + 1)),
    "dict in list": ([{"second": False}], lambda a: a[0]["second"], lambda m: m.attribute[0].update(second=True)),
    "set": ({"a"}, lambda a: "b" in a, lambda m: m.attribute.add("b")),
    "deque": (deque([0]), lambda a: len(a) > 1, lambda m: m.attribute.append(1)),
    "bytearray": (bytearray(2), lambda a: bool(a[0]), lambda m: m.attribute.__setitem__(0, 1)),
    "array": (np.zeros(3), lambda a: bool(a[1]), lambda m: m.attribute.__setitem__(1, 1)),
    "array of objects": (
        np.array([Settings()], dtype=object), lambda a: a[0].second, lambda m: set_attribute(m.attribute[0], True),
    ),
    "dataclass": (Settings(), lambda a: a.second, lambda m: set_attribute(m.attribute, True)),
    "dataclass with slots": (SlottedSettings(), lambda a: a.second, lambda m: set_attribute(m.attribute, True)),
    "dict in dataclass": (Settings(), lambda a: "x" in a.inner, lambda m: m.attribute.inner.update(x=1)),
    "slots": (Slotted(), lambda a: a.second, lambda m: set_attribute(m.attribute, True)),
    "named tuple": (Pair(Settings(), 1), lambda a: a.a.second, lambda m: set_attribute(m.attribute.a, True)),
    "enum": (Branch.first, lambda a: a is Branch.second, lambda m: setattr(m, "attribute", Branch.second)),
    "nested object": (
        SimpleNamespace(inner=SimpleNamespace(second=False)),
        lambda a: a.inner.second, lambda m: set_attribute(m.attribute.inner, True),
    ),
    "class": (ClassSettings, lambda a: a.second, lambda m: set_attribute(m.attribute, True)),
    "closure over a dict": (
        closure_over({"second": False}), lambda a: a(),
        lambda m: m.attribute.__closure__[0].cell_contents.update(second=True),
    ),
    "closure that changes itself": (counter(), lambda a: a(), lambda m: m.attribute(True)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_changed_attribute_is_noticed(case, monkeypatch):
    attribute, choose, change = CASES[case]
    monkeypatch.setattr(ClassSettings, "second", False)
    model = Chosen(attribute, choose)
    before = cached_trace(model, EXAMPLE)
    assert list(before.layers) == ["first"]
    assert cached_trace(model, EXAMPLE).program is before.program
    change(model)
    assert list(cached_trace(model, EXAMPLE).layers) == ["second"]


class NotTakenApart:
    """State that only its own methods reach; it can be copied, but not taken apart."""

    def __init__(self):
        self._state = {"second": False}

    def __reduce_ex__(self, protocol):
        raise TypeError("cannot be pickled")

    def __deepcopy__(self, memo):
        return self


def test_what_cannot_be_compared_is_traced_anew():
    model = Chosen(NotTakenApart(), lambda a: a._state["second"])
    before = cached_trace(model, EXAMPLE)
    assert cached_trace(model, EXAMPLE).program is not before.program
    model.attribute._state["second"] = True
    assert list(cached_trace(model, EXAMPLE).layers) == ["second"]
    assert model not in caching._cache


@pytest.mark.parametrize("value", [threading.Lock(), iter(x for x in ()), np.zeros((9 << 20,))])
def test_objects_without_a_fingerprint(value):
    with pytest.raises(NotComparableError):
        fingerprint_of([value])


def test_an_exchanged_method_is_noticed(monkeypatch):
    model = Chosen(0, lambda a: a)
    cached_trace(model, EXAMPLE)
    monkeypatch.setattr(Chosen, "forward", lambda self, x: self.second(x))
    assert list(cached_trace(model, EXAMPLE).layers) == ["second"]


def test_where_values_decide_they_are_compared():
    class Deciding(Chosen):
        def forward(self, x):
            return self.second(x) if x.sum() * self.first.bias.abs().max() > 0 else self.first(x)

    model = Deciding(None, None)
    assert list(cached_trace(model, -EXAMPLE).layers) == ["first"]
    assert list(cached_trace(model, EXAMPLE).layers) == ["second"]
    with torch.no_grad():
        model.first.bias.zero_()
    assert list(cached_trace(model, EXAMPLE).layers) == ["first"]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.activation = torch.relu
        self.shortcut = [self.bn1, nn.functional.relu, self.forward]  # cycles, functions and bound methods

    def forward(self, x):
        return self.activation(x + self.bn2(self.conv2(self.activation(self.bn1(self.conv1(x))))))


def test_ordinary_models_are_traced_once(monkeypatch):
    traces, trace = [], caching.trace
    monkeypatch.setattr(caching, "trace", lambda *args, **named: traces.append(1) or trace(*args, **named))
    models = {
        "residual": (
            nn.Sequential(nn.Conv2d(3, 4, 3), Block(4), Block(4), nn.Flatten(), nn.LazyLinear(5)),
            (1, 3, 8, 8),
        ),
        "recurrent": (nn.Sequential(nn.LSTM(4, 3)), (5, 2, 4)),
        "attention": (nn.TransformerEncoderLayer(8, 2), (5, 2, 8)),
        "parametrized": (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))), (2, 4)),
    }
    for number, (model, shape) in enumerate(models.values(), start=1):
        model(torch.ones(shape))
        for _ in range(4):
            cached_trace(model, torch.ones(shape))
            model.train(not model.training)
        assert len(traces) == number


def test_fingerprints_do_not_depend_on_reused_addresses():
    model = nn.Module()
    model.tensors = [torch.ones(2)]
    before = fingerprint_of(model)
    assert before == fingerprint_of(model)
    for _ in range(20):  # the allocator likes to reuse the place of an object that is gone
        model.tensors = None
        model.tensors = [torch.ones(2)]
        assert fingerprint_of(model) != before
