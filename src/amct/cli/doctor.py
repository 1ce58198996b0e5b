"""``amct doctor`` finds out why a quantized model is worse than it should be, and what helps."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amct.cli.front_door import front_door
from amct.cli.model_pair import check_file
from amct.cli.options import MODEL_HELP, DataOptions, JsonOption, takes_data
from amct.cli.own_layers import OwnLayers, takes_own_layers
from amct.cli.printing import as_json as json_text
from amct.cli.printing import show, show_json
from amct.errors import ArgumentError
from amct.log import few_lines

if TYPE_CHECKING:
    from amct.cli.front_door import FrontDoor
    from amct.search.doctor import Diagnosis

MOST_BATCHES = 64
"""Batches of each of both parts of the data."""


@takes_own_layers
@takes_data
def doctor(  # noqa: PLR0913  the options of a command
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    weights: Annotated[Path | None, typer.Argument(help="The caffemodel of a prototxt.")] = None,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the config of the best remedy: net.json.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="An AMCT config, simple (.cfg) or full (.json).")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="What the model is calibrated with; half of --data unless given.")
    ] = None,
    data: DataOptions,
    own: OwnLayers,
    as_json: JsonOption = False,
) -> None:
    """Find out why a quantized model is worse than it should be: the layer, the cause, and what helps. No labels.

    Example: amct doctor net.onnx --data images.npy -o net.json
    """
    with few_lines():
        own.refuse_unless_caffe(weights is not None)
        if config is not None:
            check_file(str(config))
        data.check()
        found = _diagnosed(model, weights, data, config, calibration)
    best = next((each for each in found.remedies if each.gain > 0), None)
    if output is not None and best is not None:
        from amct import atomic

        atomic.write_text(output, json_text(best.config) + "\n")
    if as_json:
        show_json(asdict(found))
        return
    show(str(found))
    if output is not None and best is None:
        show(f"no remedy helps: {output} is not written")
    elif best is not None and output is not None:
        show(f"wrote   {output}: {best.name}{', together with --equalize' if best.equalize else ''}")


def _diagnosed(
    model: str, weights: Path | None, data: DataOptions, config: Path | None, calibration: Path | None
) -> Diagnosis:
    """Calibrate with one part of the data, and look at the other."""
    door = front_door(model, weights, data)
    seen = _batches(door, door.data)
    if calibration is not None:
        own = _batches(door, replace(door.data, data=calibration))
    else:
        own, seen = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    if not own or not seen:
        raise ArgumentError(
            f"{data.data}: expected at least two batches of {door.batch_size}; give more data or --calibration"
        )
    return door.diagnose(own, seen, config)


def _batches(door: FrontDoor, data: DataOptions) -> list[Any]:
    from itertools import islice

    from amct.cli.batches import named_batches
    from amct.data import StoredBatches

    size = door.batch_size
    if door.names:
        arrays = islice(named_batches(door.names, replace(data, batch_size=size)), 2 * MOST_BATCHES)
        found = [door.converted(batch) for batch in arrays]
        return [batch for batch in found if len(next(iter(batch.values()))) == size] or found
    stored: StoredBatches = replace(data, batch_size=size).stored()
    found = [door.converted(batch) for batch in islice(stored, 2 * MOST_BATCHES)]
    return [batch for batch in found if len(batch) == size] or found
