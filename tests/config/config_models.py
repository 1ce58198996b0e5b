"""The layers of the networks behind the goldens and samples, written down so that no framework is needed."""

from __future__ import annotations

from pathlib import Path

from amct.config.layers import LayerInfo

GOLDEN = Path(__file__).parent.parent / "golden"
SAMPLES = GOLDEN / "config"


def layers(*described: str, **facts: dict) -> list[LayerInfo]:
    """``layers("conv:Conv2d", conv={"can_pack_int4": False})``: names with types, and facts by name."""
    pairs = (item.rsplit(":", 1) for item in described)
    return [LayerInfo(name=name, type=kind, **facts.get(name, {})) for name, kind in pairs]


def _resnet20() -> list[LayerInfo]:
    """CIFAR-10 ResNet-20; the first convolution has 3 input channels, an odd number."""
    found = layers("conv1:Conv2d", "bn1:BatchNorm2d", conv1={"can_pack_int4": False})
    for stage in (1, 2, 3):
        for block in (0, 1, 2):
            prefix = f"layer{stage}.{block}"
            found += layers(
                *(f"{prefix}.{name}" for name in ("conv1:Conv2d", "bn1:BatchNorm2d", "conv2:Conv2d", "bn2:BatchNorm2d"))
            )
    return found + layers("linear:Linear")


RESNET20 = _resnet20()
MIX = layers(
    "conv:Conv2d", "bn:BatchNorm2d", "grp:Conv2d", "dw:Conv2d", "dil:Conv2d", "circ:Conv2d", "pool:AvgPool2d",
    "deconv:ConvTranspose2d", "deconvg:ConvTranspose2d", "fc:Linear", "fcnb:Linear",
    grp={"can_pack_int4": False},
    dw={"can_pack_int4": False, "has_bias": False},
    circ={"refusal": "padding_mode is circular"},
    deconvg={"can_pack_int4": False},
    fcnb={"has_bias": False},
)  # fmt: skip
CONV1D3D = layers(
    "c1:Conv1d", "bn1:BatchNorm1d", "d1:ConvTranspose1d", "c3:Conv3d", "bn3:BatchNorm3d", "d3:ConvTranspose3d"
)
LSTM = layers("rnn:LSTM", "fc:Linear")
GRU = layers("rnn:GRU", "fc:Linear")
RNN = layers("rnn:RNN", "fc:Linear")
BIDIRECTIONAL = layers("rnn:LSTM", "fc:Linear", rnn={"refusal": "it is bidirectional"})
_TWICE, _TIED = {"refusal": "it is called twice"}, {"refusal": "its weight is shared"}
SHARED = layers(
    "a:Conv2d",
    "b:Conv2d",
    "alias:Conv2d",
    "c:Conv2d",
    "t1:Linear",
    "t2:Linear",
    a=_TWICE,
    alias=_TWICE,
    t1=_TIED,
    t2=_TIED,
)
ATTENTION = layers("q:Linear", "k:Linear", "v:Linear", "o:Linear", "e:Embedding", "ln:LayerNorm")
POOLS = layers(
    "c1:Conv2d", "c2:Conv2d", "ap1:AvgPool2d", "ap2:AvgPool2d", "big:AvgPool2d", "gap:AdaptiveAvgPool2d", "fc:Linear"
)

RETRAIN = layers(
    "c1:Conv2d", "b1:BatchNorm2d", "c2:Conv2d", "b2:BatchNorm2d", "c3:Conv2d", "dw:Conv2d", "pool:AvgPool2d",
    "fc1:Linear", "fc:Linear",
    c1={"can_pack_int4": False, "has_bias": False},
    dw={"can_pack_int4": False, "depthwise": True},
)  # fmt: skip

CAFFE_RESNET = layers(
    "data:Input", "conv1:Convolution", "bn_conv1:BatchNorm", "scale_conv1:Scale", "conv1_relu:ReLU", "pool1:Pooling",
    "res2a_branch1:Convolution", "res2a:Eltwise", "pool5:Pooling", "lstm1:LSTM", "fc1000:InnerProduct", "prob:Softmax",
    res2a={"inputs": 2},
    pool5={"average_pooling": True},
)  # fmt: skip
CAFFE_TWO_CONVS = layers("data:Input", "conv1:Convolution", "conv2:Convolution")


def network_of(case: str) -> list[LayerInfo]:
    """The network of a golden case, by the beginning of its name."""
    return next(network for prefix, network in _NETWORKS.items() if case.startswith(prefix))


_NETWORKS = {
    "r20_": RESNET20,
    "abc_": RESNET20,
    "small_mix_": MIX,
    "small_conv1d3d_": CONV1D3D,
    "small_lstm_bi2_": BIDIRECTIONAL,
    "small_lstm_": LSTM,
    "small_gru_": GRU,
    "small_rnn_": RNN,
    "small_shared_": SHARED,
    "small_matmul_": ATTENTION,
    "kv_": ATTENTION,
    "qat_": RETRAIN,
    "prune_": RETRAIN,
    "sparse_": RETRAIN,
    "compressed_": RETRAIN,
    "small_": POOLS,
}


def marked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """A text without its ``@`` marks, and the line and column of each: where mistakes are to be reported."""
    places: list[tuple[int, int]] = []
    clean: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        pieces = line.split("@")
        column = 1
        for piece in pieces[:-1]:
            column += len(piece)
            places.append((number, column))
        clean.append("".join(pieces))
    return "\n".join(clean), places


def places_of(error: Exception) -> list[tuple[int, int]]:
    """The line and column of each mistake an error lists."""
    return [(problem.position.line, problem.position.column) for problem in error.problems]
