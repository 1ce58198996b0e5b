"""A small report with everything in it, and names that would like to leave their place."""

from __future__ import annotations

import math

from amct.model.verdict import Verdict
from amct.report.content import (
    ActivationContent,
    Figure,
    FileSize,
    Histogram,
    InputContent,
    LayerContent,
    LayerNote,
    ReportContent,
    WeightRanges,
)
from amct.report.network import Box, Network

HOSTILE = '</script><script>window.harm=1</script><img src=x onerror="window.harm=1">&amp;\u2028\'"{{ 7*7 }}'


def activation(clipped: float = 0.001) -> ActivationContent:
    counts = tuple(range(64))
    return ActivationContent(
        minimum=-0.5,
        maximum=7.5,
        clip_low=0.0,
        clip_high=6.375,
        clipped=clipped,
        saturated=2 * clipped,
        histogram=Histogram(low=-0.5, high=7.5, counts=counts, below=0, above=3),
    )


def layer(name: str, sqnr: float | None, *, kind: str = "Conv2d", channels: int = 8) -> LayerContent:
    return LayerContent(
        name=name,
        type=kind,
        inputs=(InputContent(bits=8, scale=0.025, offset=-128, activation=activation()),),
        weight_bits=8,
        sqnr=sqnr,
        cosine=0.999,
        weights=WeightRanges(
            minimum=tuple(-1.0 - place for place in range(channels)),
            maximum=tuple(2.0 + place for place in range(channels)),
        ),
    )


def small_report() -> ReportContent:
    return ReportContent(
        model="Net <b>",
        measured_on="3 batches",
        outputs_of="net_qdq_model.onnx",
        verdict=Verdict(level="acceptable", reasons=("below 10 dB: <i>",)),
        network=Network(
            boxes=(
                Box(name="x", type="input"),
                Box(name="conv1", type="Conv", inputs=(0,), layer="conv1", integer=True, merged=("Relu",)),
                Box(name="conv10", type="Conv", inputs=(1,), layer="conv10", integer=True),
                Box(name=HOSTILE, type="Conv", inputs=(1,), layer=HOSTILE, integer=True),
                Box(name="sum", type="Add", inputs=(2, 3)),
                Box(name="fc", type="Gemm", inputs=(4,), layer="fc", integer=True),
            )
        ),
        figures=(
            Figure(label="top1", before="0.71", after="0.70", change="−0.01"),
            Figure(label="cosine", after="0.9993"),
        ),
        files=(FileSize(name="net_qdq_model.onnx", size=123_456),),
        layers=(
            layer("conv1", 30.5),
            layer("conv10", 21.25),
            layer("conv2", math.inf),
            layer(HOSTILE, 9.5),
            LayerContent(name="pool", type="AvgPool2d", inputs=(InputContent(bits=8),)),
            layer("fc", 25.0, kind="Linear"),
        ),
        fused=(LayerNote(layer="bn1", text='folded into "conv1"'),),
        skipped=(LayerNote(layer="head.norm", text="LayerNorm is not quantizable <i>"),),
        config="batch_num: 2 <script>",
        versions=(("amct", "0.1.0"),),
        created="2026-01-02 03:04 UTC",
    )


def large_report(layers: int = 1000) -> ReportContent:
    """A network of many layers with skips over ten of them."""
    names = [f"stage{place // 100}.block{place % 100}.conv" for place in range(layers)]
    boxes = [Box(name="image", type="input")]
    for place, name in enumerate(names):
        skip = (place - 9,) if place % 10 == 9 else ()
        boxes.append(Box(name=name, type="Conv", inputs=(place, *skip), layer=name, integer=True))
    return ReportContent(
        model="Large",
        measured_on="1 batch",
        layers=tuple(layer(name, 8.0 + place * 37 % 40, channels=64) for place, name in enumerate(names)),
        network=Network(boxes=tuple(boxes)),
    )
