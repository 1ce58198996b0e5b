"""What this package knows of ONNX's operators: the one table of their names.

Which operator a layer kind is, is in ``kinds.py``. How one is written or rewritten stands with the rule that does it.
"""

from __future__ import annotations


def _operators(names: str) -> frozenset[str]:
    return frozenset(names.split())


# -- values move -------------------------------------------------------------------------------------------------------

ARRANGING = _operators("Flatten Identity Reshape Squeeze Transpose Unsqueeze")
"""All values of the input, in another order or shape."""
VALUE_KEEPING = ARRANGING | _operators("MaxPool Pad")
"""The largest input values stay: factors propagate in both directions."""
VALUE_PICKING = VALUE_KEEPING | _operators("DepthToSpace Expand Gather Resize Slice SpaceToDepth Split Tile")
"""Every value is one of the input's: factors propagate forward."""
STORED_MOVING = ARRANGING | _operators("Cast Concat Gather Slice Split")
"""Allowed between a stored weight and its layer; exporters keep them in the graph if the weight is large."""
MOVING = STORED_MOVING | _operators("Dropout Expand Pad Resize Tile")
"""Residual streams go through them."""

# -- values are computed -----------------------------------------------------------------------------------------------

REDUCING = _operators("ReduceL2 ReduceMean ReduceSum ReduceSumSquare")
"""With those of ``STORED_MOVING`` and ``STORED_ARITHMETIC`` they may normalize a weight in each run."""
STORED_ARITHMETIC = _operators("Abs Add Div Exp Mul Neg Pow Reciprocal Sqrt Sub")
"""They broadcast: a result may be larger than its operands."""
STATISTIC = REDUCING | _operators("Abs Add Cast Clip Div Expand Identity Max Mul Pow Reciprocal Sqrt Sub")
"""They compute the mean or the standard deviation of a sample from its values."""
NORMALIZING = _operators(
    "GroupNormalization InstanceNormalization LayerNormalization LpNormalization MeanVarianceNormalization "
    "RMSNormalization SimplifiedLayerNormalization"
)
LAYER_NORM_READERS = _operators("LayerNormalization ReduceMean Sub")
"""The operators of a LayerNorm, in one piece or as arithmetic, that read its input."""
ACTIVATIONS = _operators("Relu Clip")
"""The quantizer of their output absorbs them."""
ZERO_TO_ONE = _operators("Sigmoid Softmax")
AVERAGING = _operators("AveragePool GlobalAveragePool")
INTEGER_ELEMENTWISE = AVERAGING | _operators("Add Mul Concat Sigmoid LeakyRelu")
"""onnxruntime computes them in integers if every input and the output is quantized."""
STREAM = MOVING | _operators("Add Sum")
"""A residual stream continues through them."""
STREAM_START = STREAM | _operators(
    "Clip Div Elu Erf Gelu HardSigmoid HardSwish LeakyRelu MaxPool Mish Mul PRelu Relu Sigmoid Softplus Sub Swish Tanh"
)
"""Between the layer that starts a residual stream and the stream."""
PICTURE_CHEAP = ARRANGING | _operators(
    "Relu Clip LeakyRelu PRelu Sigmoid HardSigmoid HardSwish Tanh Gelu Erf Elu Softplus Cast Dropout Shape Gather "
    "Slice Neg Sqrt Exp Mul Add Sub Div Pow"
)
"""In a picture of a network they are drawn with the operator before them, if they have one computed input."""
RANDOM = _operators("RandomNormal RandomUniform")

# -- layers ------------------------------------------------------------------------------------------------------------

BATCH_NORM = "BatchNormalization"
WITH_BIAS = _operators("Conv ConvTranspose Gemm")
"""Weighted operators with an input for a bias; a MatMul has none."""
FLOAT_WEIGHTED = _operators("DeformConv Einsum GroupNormalization InstanceNormalization LayerNormalization PRelu RNN")
"""Operators with weights that have no quantized form; they are reported as skipped."""
QUANTIZED = _operators(
    "ConvInteger DequantizeLinear DynamicQuantizeLinear MatMulInteger MatMulIntegerToFloat QAttention QGemm QLinearAdd "
    "QLinearConv QLinearMatMul QuantizeLinear"
)
ASCEND = _operators("AscendDequant AscendQuant BasicGRUInplaceFillWindowCache BasicLSTMInplaceFillWindowCache")
"""The chip's own operators, which cannot be run here."""
