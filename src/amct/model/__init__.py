"""One small graph for every kind of model: which layer feeds which, what can be folded, and why something cannot.

Each front door (PyTorch, Caffe, ONNX) describes its model as a ``Graph`` of ``Node``s and its quantizable layers as
``LayerFacts``s. What a front door leaves out is a ``Skip`` with the reason, never silence. Nothing here needs torch.
"""

from amct.model.fusion import Fusion, FusionPattern, find_fusions, find_leading_fusions
from amct.model.graph import Graph, Node
from amct.model.layer_facts import LayerFacts
from amct.model.skip import Skip

__all__ = [
    "Fusion",
    "FusionPattern",
    "Graph",
    "LayerFacts",
    "Node",
    "Skip",
    "find_fusions",
    "find_leading_fusions",
]
