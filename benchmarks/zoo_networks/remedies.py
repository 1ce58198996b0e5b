"""What each remedy of ``docs/my-accuracy-dropped.md`` gains: the SQNR of the simulation against the defaults."""

from __future__ import annotations

import json
import math
import traceback
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

import amct.pytorch as amct
from amct.errors import AmctError
from zoo_networks.measuring import sqnr

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from amct.pipeline.quantized_model import QuantizedModel
    from zoo_networks.network import Network, Subject

Row = dict[str, Any]
_MINMAX = amct.IfmrSettings(max_percentile=1.0, min_percentile=1.0, search_range=(1.0, 1.01), search_step=0.01)
_ITERATIONS = 100


def _common(**settings: Any) -> dict[str, Any]:  # noqa: ANN401  settings of a layer
    return {"config": amct.QuantConfig(common=amct.LayerConfig(**settings))}


REMEDIES: dict[str, dict[str, Any]] = {
    "nearest rounding, plain biases": {"config": amct.QuantConfig(weight_rounding="nearest", bias_correction=False)},
    "no bias correction": {"config": amct.QuantConfig(bias_correction=False)},
    "HFMG": _common(activations=amct.HfmgSettings()),
    "min-max": _common(activations=_MINMAX),
    "16-bit activations": _common(activations=amct.IfmrSettings(num_bits=16)),
    "DMQ": _common(migration_strength=0.5),
    "equalization": {"equalize": True},
    "AdaRound": {**_common(weights=amct.AdaRoundSettings(num_iteration=_ITERATIONS)), "adaround": "plain"},
    "AdaRound, fast": {**_common(weights=amct.AdaRoundSettings(num_iteration=_ITERATIONS)), "adaround": "fast"},
}
"""Arguments of ``quantize``. Settings that a door or a type cannot have are refused there, with the reason."""


def measure_remedies(network: Network, folder: Path) -> None:
    """Measure all remedies on a network; the row is ``row.json`` in the folder."""
    row: Row = {"name": network.name, "outcome": "failed", "step": "build", "remedies": {}}
    path = folder / "row.json"
    path.write_text(json.dumps(row))
    try:
        subject = network.build(folder)
        base = _level(subject, subject.quantize())
    except Exception as error:  # noqa: BLE001  a row of the other table
        path.write_text(json.dumps({**row, "error": f"{type(error).__name__}: {error}"[:500]}))
        return
    row |= {"outcome": "measured", "simulation_sqnr": base}
    for name, arguments in REMEDIES.items():
        row["step"] = name
        path.write_text(json.dumps(row))
        try:
            found = _level(subject, subject.quantize(**arguments))
            row["remedies"][name] = {"gain": None if None in (base, found) else found - base}
        except AmctError as error:
            row["remedies"][name] = {"refused": f"{type(error).__name__}: {error}"[:500]}
        except TypeError as error:  # the door has no such argument
            known = "unexpected keyword argument" in str(error)
            row["remedies"][name] = {"refused" if known else "error": f"TypeError: {error}"[:500]}
        except Exception as error:  # noqa: BLE001  what the table is for
            lines = "".join(traceback.format_exception(error))
            row["remedies"][name] = {"error": f"{type(error).__name__}: {error}"[:500], "traceback": lines[-3000:]}
        path.write_text(json.dumps(row))
    path.write_text(json.dumps({**row, "step": "done"}))


def _level(subject: Subject, quantized: QuantizedModel) -> float | None:
    """The SQNR of the simulation, in dB."""
    names = [value.name for value in quantized.prepared.float_model(None).graph.output]
    wanted = [subject.file_reference(batch, names) for batch in subject.test]
    given = [subject.simulated_outputs(quantized, batch, names) for batch in subject.test]
    return sqnr(wanted, given)


def remedy_table(rows: Iterable[Row]) -> list[str]:
    """The table: median and worst gain of each remedy in dB, where it was refused, and raw errors."""
    measured = [row for row in rows if row.get("outcome") == "measured"]
    lines = [
        f"{len(measured)} networks; gain of the simulation's SQNR over that of the defaults.",
        "",
        "| remedy | networks | median gain | best | worst | gains ≥ 1 dB | refused, with a reason | raw errors |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in REMEDIES:
        found = [row["remedies"][name] for row in measured if name in row["remedies"]]
        gains = [each["gain"] for each in found if each.get("gain") is not None and math.isfinite(each["gain"])]
        figures = [f"{value:+.1f}" for value in (median(gains), max(gains), min(gains))] if gains else ["", "", ""]
        helped = int(np.sum(np.array(gains) >= 1)) if gains else 0
        refused, errors = (sum(key in each for each in found) for key in ("refused", "error"))
        lines.append(f"| {name} | {len(gains)} | {' | '.join(figures)} | {helped} | {refused} | {errors} |")
    return lines
