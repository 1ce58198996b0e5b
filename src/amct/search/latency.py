"""What each choice costs in milliseconds on this machine: whole files are timed, as a layer changes its neighbours."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from amct import log
from amct.errors import ExportError, SearchError
from amct.export.check.running import LoadedModel, median_seconds
from amct.search.choices import FLOAT

if TYPE_CHECKING:
    from collections.abc import Callable

    from amct.search.run import Candidates

logger = logging.getLogger(__name__)

BUDGET = 0.4
"""Seconds for one comparison of two files."""


def latency_of(candidates: Candidates) -> Callable[[str, str], float]:
    """The cost of a choice: by how much the file is slower, in ms, if only this layer becomes that.

    A layer that is faster in float has its lowest cost there, so the search leaves it float.

    Raises:
        SearchError: The model has no QDQ file that could be timed.
    """
    layers = candidates.base.layers
    quantized = next(each for each in candidates.choices if each != FLOAT)
    exported = candidates.made({}).exported()
    if isinstance(exported, ExportError):
        raise SearchError(f'minimize="latency": there is no file to be timed: {exported}')
    inputs = candidates.base.prepared.onnx_inputs(candidates.base.examples[0])
    present = LoadedModel(exported.model)
    found: dict[tuple[str, str], float] = {}
    share = 0.0
    for layer in log.track(layers, "Timing each layer"):
        for choice in candidates.possible(layer):
            if choice == quantized or (len(layers) == 1 and choice == FLOAT):
                continue
            other = candidates.made({layer: choice}).exported()
            if isinstance(other, ExportError):
                continue
            loaded = LoadedModel(other.model)
            times = median_seconds(
                {"present": lambda: present.run(inputs), "other": lambda loaded=loaded: loaded.run(inputs)},  # type: ignore[misc]
                budget=BUDGET,
            )
            loaded.close()
            share = share or 1000 * times["present"] / len(layers)
            found[layer, choice] = 1000 * (times["other"] - times["present"])
    present.close()
    return lambda layer, choice: share + found.get((layer, choice), 0.0)
