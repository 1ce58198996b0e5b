"""``caffe.draw``: a net as a picture, drawn by the program ``dot`` of Graphviz, or as its text without it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from amct.atomic import AnyPath, write_bytes
from amct.caffe.engine.graph import filter_net
from amct.caffe.engine.upgrade import upgrade_net
from amct.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amct.caffe.engine.messages import ProtoMessage

_TEXTS = ("dot", "gv", "raw")
_COLORS = {"Convolution": "#FF5050", "Deconvolution": "#FF5050", "Pooling": "#FF9900", "InnerProduct": "#CC33FF"}
_WINDOWS = {"Convolution": "convolution_param", "Deconvolution": "convolution_param", "Pooling": "pooling_param"}


class DotGraph:
    """A graph in the language of Graphviz; it has the methods of pydot's graphs that pycaffe uses."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def to_string(self) -> str:
        """The text."""
        return "\n".join(self._lines) + "\n"

    def create(self, format: str = "png") -> bytes:  # noqa: A002  pydot's name
        """The picture in a format of Graphviz (png, svg, pdf, …), or the text (dot).

        Raises:
            ArgumentError: The program dot is missing or cannot write that format.
        """
        text = self.to_string().encode()
        if format in _TEXTS:
            return text
        program = shutil.which("dot")
        if program is None:
            raise ArgumentError(
                f"draw: a picture ({format}) needs the program dot of Graphviz (Debian: apt-get install graphviz); "
                "without it, write a .dot file"
            )
        done = subprocess.run([program, f"-T{format}"], input=text, capture_output=True, check=False)
        if done.returncode != 0:
            raise ArgumentError(f"draw: dot failed: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout


def get_pydot_graph(
    caffe_net: ProtoMessage, rankdir: str, label_edges: bool = True, phase: int | None = None, display_lrm: bool = False
) -> DotGraph:
    """The graph of a NetParameter: its layers as boxes, its blobs between them.

    Args:
        caffe_net: The net, in any of Caffe's formats.
        rankdir: LR or TB: from left to right, or from top to bottom.
        label_edges: Whether edges tell the number of outputs.
        phase: Only the layers of this phase; None: all.
        display_lrm: Whether layers tell their learning rates.
    """
    net = type(caffe_net)()
    net.CopyFrom(caffe_net)
    net = upgrade_net(net, "net")
    if phase is not None:
        net.state.phase = phase
        net = filter_net(net)
    name = _quoted(net.name or "Net")
    return DotGraph([f"digraph {name} {{", f"rankdir={_quoted(rankdir)};", *_lines(net, label_edges, display_lrm), "}"])


def draw_net(
    caffe_net: ProtoMessage, rankdir: str, ext: str = "png", phase: int | None = None, display_lrm: bool = False
) -> bytes:
    """A picture of a NetParameter in the format ``ext``; ``dot`` is its text."""
    return get_pydot_graph(caffe_net, rankdir, phase=phase, display_lrm=display_lrm).create(format=ext)


def draw_net_to_file(
    caffe_net: ProtoMessage,
    filename: AnyPath,
    rankdir: str = "LR",
    phase: int | None = None,
    display_lrm: bool = False,
) -> None:
    """Write a picture of a NetParameter; the ending of the file names its format."""
    path = Path(filename)
    write_bytes(path, draw_net(caffe_net, rankdir, path.suffix[1:] or "png", phase, display_lrm))


def _lines(net: ProtoMessage, label_edges: bool, display_lrm: bool) -> Iterator[str]:
    blobs: dict[str, None] = {}
    for layer in net.layer:
        node = _quoted(f"layer {layer.name}")
        color = _COLORS.get(layer.type, "#6495ED")
        label = _quoted("\n".join(_described(layer, display_lrm)))
        yield f"{node} [label={label}, shape=box, style=filled, fillcolor={_quoted(color)}];"
        for blob in (*layer.bottom, *layer.top):
            blobs[blob] = None
        yield from (f"{_quoted(f'blob {blob}')} -> {node};" for blob in layer.bottom)
        count = layer.convolution_param.num_output or layer.inner_product_param.num_output
        edge = f" [label={_quoted(str(count))}]" if label_edges and count else ""
        yield from (f"{node} -> {_quoted(f'blob {blob}')}{edge};" for blob in layer.top if blob not in layer.bottom)
    yield from (f"{_quoted(f'blob {blob}')} [label={_quoted(blob)}, shape=octagon];" for blob in blobs)


def _described(layer: ProtoMessage, display_lrm: bool) -> Iterator[str]:
    """What the box of a layer says."""
    yield f"{layer.name} ({layer.type})"
    if layer.type in _WINDOWS:
        options = getattr(layer, _WINDOWS[layer.type])
        for name, default in (("kernel_size", 0), ("stride", 1), ("pad", 0)):
            value = getattr(options, name)
            yield f"{name}: {value if isinstance(value, int) else next(iter(value), default)}"
    if display_lrm and layer.param:
        yield f"lr_mult: {', '.join(f'{param.lr_mult:g}' for param in layer.param)}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
