"""The network as a graph of boxes: read from ONNX (``onnx_graph``), placed (``layout``), drawn (``drawing``)."""

from __future__ import annotations

from amct.report.network.boxes import Box, Network, merged_chains

__all__ = ["Box", "Network", "merged_chains"]
