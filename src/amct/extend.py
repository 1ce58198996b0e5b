"""Extension points for packages outside this one. Nothing here imports torch before it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amct.export.formats import Exporter


def register_exporter(*, name: str, exporter: Exporter, file_name: str | None = None) -> None:
    """Add an export format that ``save(formats=…)`` of every front door and ``amct quantize --formats`` offer.

    Args:
        name: What users write: letters, digits and "_".
        exporter: Called with an ``ExportRequest``: ``model`` (the float ONNX model, not to be changed), ``bindings``
            (layer, kind, node), ``factors`` (by layer), ``tensors`` (factors of tensors between layers, or None) and
            ``options``. Returns an ONNX ModelProto, an ``ExportedModel`` (a model with a report) or bytes.
        file_name: The file is ``<prefix>_<file_name>``; ``<name>_model.onnx`` unless given.

    Raises:
        ArgumentError: the name is taken or cannot be used.
    """
    from amct.export import formats

    formats.register_exporter(name=name, exporter=exporter, file_name=file_name)
