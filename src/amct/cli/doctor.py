"""``amct doctor`` finds out why a quantized model is worse than it should be, and what helps."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amct.cli.model_layers import ONNX_ENDING
from amct.cli.model_pair import check_file
from amct.cli.options import MODEL_HELP, DataOptions, JsonOption, takes_data
from amct.cli.own_layers import OwnLayers, takes_own_layers
from amct.cli.printing import as_json as json_text
from amct.cli.printing import show, show_json
from amct.errors import ArgumentError
from amct.log import few_lines

if TYPE_CHECKING:
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
    if output is not None and found.remedies:
        from amct import atomic

        atomic.write_text(output, json_text(found.remedies[0].config) + "\n")
    if as_json:
        show_json(asdict(found))
        return
    show(str(found))
    if output is not None and found.remedies:
        show(f"wrote   {output}: {found.remedies[0].name}")


def _diagnosed(
    model: str, weights: Path | None, data: DataOptions, config: Path | None, calibration: Path | None
) -> Diagnosis:
    """Calibrate with one part of the data, and look at the other."""
    from amct.cli.batches import fixed_batch_size
    from amct.cli.search import door_of

    _, fitted, convert, batch = door_of(model, weights, data)
    if weights is None and model.endswith(ONNX_ENDING):
        from amct.onnx_model.reading import read_model

        batch = fixed_batch_size(read_model(model).model) or batch
    seen = _batches(fitted, batch, convert)
    if calibration is not None:
        own = _batches(replace(fitted, data=calibration), batch, convert)
    else:
        own, seen = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    if not own or not seen:
        raise ArgumentError(f"{data.data}: expected at least two batches of {batch}; give more data or --calibration")
    if weights is not None:
        import amct.caffe

        return amct.caffe.diagnose(model, weights, own, seen, config)
    if model.endswith(ONNX_ENDING):
        import amct.onnx_model

        return amct.onnx_model.diagnose(model, own, seen, config)
    import amct.pytorch
    from amct.cli.model_layers import load_reference

    return amct.pytorch.diagnose(load_reference(model), own, seen, config)


def _batches(data: DataOptions, size: int, convert: Any) -> list[Any]:  # noqa: ANN401  a function of an array
    from itertools import islice

    from amct.data import StoredBatches

    stored: StoredBatches = replace(data, batch_size=size).stored()
    found = [convert(batch) for batch in islice(stored, 2 * MOST_BATCHES)]
    return [batch for batch in found if len(batch) == size] or found
