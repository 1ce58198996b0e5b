"""Times the layers of a net, as ``caffe time`` does."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amct.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amct.caffe.engine.net import Net


@dataclass
class LayerTimes:
    """Mean milliseconds of one iteration: of each layer, in both directions, and of whole passes.

    Attributes:
        forward: By the place of the layer in the net.
        backward: Likewise; layers without gradients take none.
        passes: Of the whole forward and backward pass.
    """

    names: list[str]
    forward: list[float]
    backward: list[float]
    passes: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def lines(self) -> Iterator[str]:
        """The times in the form of Caffe's."""
        yield "Average time per layer:"
        for direction, times in (("forward", self.forward), ("backward", self.backward)):
            for name, milliseconds in zip(self.names, times, strict=True):
                yield f"{name:>10}\t{direction}: {milliseconds:.6g} ms."
        yield f"Average Forward pass: {self.passes[0]:.6g} ms."
        yield f"Average Backward pass: {self.passes[1]:.6g} ms."
        yield f"Average Forward-Backward: {sum(self.passes):.6g} ms."


def time_layers(net: Net, iterations: int) -> LayerTimes:
    """Run a net forward and backward, once without and then ``iterations`` times with a clock.

    Raises:
        ArgumentError: The number of iterations is not positive.
    """
    if iterations < 1:
        raise ArgumentError(f"iterations must be at least 1, got {iterations}")
    names = net.layer_names
    found = LayerTimes(names, [0.0] * len(names), [0.0] * len(names))
    net.forward()
    net.backward()
    started = 0.0

    def start(_: int) -> None:
        nonlocal started
        started = time.perf_counter()

    def stop(times: list[float], index: int) -> None:
        times[index] += (time.perf_counter() - started) * 1e3 / iterations

    for event, times in (("forward", found.forward), ("backward", found.backward)):
        net.on(f"before_{event}", start)
        net.on(f"after_{event}", lambda index, times=times: stop(times, index))  # type: ignore[misc]
    for _ in range(iterations):
        begin = time.perf_counter()
        net.forward()
        middle = time.perf_counter()
        net.backward()
        found.passes[0] += (middle - begin) * 1e3 / iterations
        found.passes[1] += (time.perf_counter() - middle) * 1e3 / iterations
    return found
