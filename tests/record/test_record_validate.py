"""Every mistake a record can have against its model, one by one, and all together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from amct.errors import RecordError, RecordValueError
from amct.record import (
    CaffeLayerRecord,
    CaffeRecord,
    DataFactors,
    KvCacheRecord,
    LayerRecord,
    PruneNode,
    PruneRecord,
    Record,
    RecordLayer,
    format_record,
    normalize_record,
    parse_caffe_record,
    parse_record,
    read_record,
    validate_record,
)
from amct.record.prune import Attribute

LAYERS = (
    RecordLayer(name="conv1", type="Conv2d", cout=4, cin=3),
    RecordLayer(name="pool", type="AvgPool2d"),
    RecordLayer(name="rnn", type="LSTM", cout=8, cin=3, gates=4),
    RecordLayer(name="fc", type="Linear", cout=10, cin=2),
    RecordLayer(name="relu", type="ReLU", quantizable=False, reason="it has no weights"),
)
CONV = LayerRecord(scale_d=0.5, offset_d=-3, scale_w=(0.1,) * 4, offset_w=(0,) * 4, act_type="INT8", wts_type="INT8")
POOL = LayerRecord(scale_d=0.5, offset_d=-3, scale_w=(1.0,), offset_w=(0,), act_type="INT8")
RNN = LayerRecord(
    scale_d=0.5,
    offset_d=0,
    scale_w=(0.1,) * 8,
    offset_w=(0,) * 8,
    scale_h=0.5,
    offset_h=0,
    scale_r=(0.1,) * 4,
    offset_r=(0,) * 4,
)
GOOD = {"conv1": CONV, "pool": POOL, "rnn": RNN}


def test_a_good_record_has_nothing_to_say():
    assert validate_record(Record(GOOD), LAYERS) == ()
    one_for_all = replace(CONV, scale_w=(0.1,), offset_w=(0,), tensor_balance_factor=(1.0, 2**-23, 2.0**23))
    assert validate_record(Record({"conv1": one_for_all, "pool": replace(POOL, scale_w=(), offset_w=())}), LAYERS) == ()


def test_the_references_records_fit_the_references_models(golden):
    r20 = read_record(golden / "amct" / "r20_dmq" / "record.txt")
    layers = [
        RecordLayer(name=name, type="Conv2d", cout=len(entry.scale_w), cin=len(entry.tensor_balance_factor))
        for name, entry in r20.items()
    ]
    assert validate_record(r20, layers) == ()
    rnn = read_record(golden / "amct" / "small_lstm_bf_hx" / "record.txt")
    layers = [
        RecordLayer(name="rnn", type="LSTM", cout=48, gates=4),
        RecordLayer(name="fc", type="Linear", cout=1),
    ]
    assert validate_record(rnn, layers) == ()
    unfinished = read_record(golden / "amct" / "small_lstm_default" / "record.txt")
    with pytest.raises(RecordError, match="Cannot find scale_d of layer 'rnn'"):
        validate_record(unfinished, layers)


@dataclass(frozen=True)
class Mistake:
    name: str
    entry: LayerRecord
    message: str
    error: type[RecordError] = RecordError


def conv(**change: object) -> LayerRecord:
    return replace(CONV, **change)  # type: ignore[arg-type]


OUTSIDE = RecordValueError
MISTAKES = [
    Mistake("convl", CONV, r'layer "convl": the model has no such layer\. Did you mean "conv1"\?'),
    Mistake("relu", CONV, 'layer "relu": a layer of type ReLU cannot be quantized here: it has no weights; remove'),
    Mistake(
        "conv1", conv(scale_d=None), "Cannot find scale_d of layer 'conv1' in record file: the entry is not complete"
    ),
    Mistake("conv1", conv(offset_d=None), "Cannot find offset_d of layer 'conv1' in record file"),
    Mistake("conv1", conv(scale_w=()), "scale_w is missing; was the model's quantization step run"),
    Mistake("conv1", conv(offset_w=()), "offset_w is missing"),
    Mistake("conv1", conv(offset_w=(0,)), "4 scale_w but 1 offset_w; there must be as many of each"),
    Mistake(
        "conv1",
        conv(scale_w=(0.1,) * 3, offset_w=(0,) * 3),
        r"scale_w must have 1 or 4 values \(one for all or one per output channel\), got 3",
    ),
    Mistake("conv1", conv(act_type="INT9"), r'act_type must be one of INT4, INT8, INT16, got INT9\. Did you mean "INT'),
    Mistake("conv1", conv(act_type="INT6"), "act_type must be one of INT4, INT8, INT16, got INT6"),
    Mistake("conv1", conv(wts_type="INT16"), "wts_type must be one of INT4, INT6, INT7, INT8, got INT16"),
    Mistake(
        "conv1", conv(act_type=None, wts_type=None, dst_type="INT16"), "dst_type must be one of INT4, INT8, got INT16"
    ),
    Mistake("conv1", conv(fakequant_precision_mode="FAST"), "fakequant_precision_mode must be one of DEFAULT, FORCE_"),
    Mistake("conv1", conv(shift_bit=(1,)), "shift_bit is not supported; remove it"),
    Mistake("pool", replace(POOL, tensor_balance_factor=(1.0,)), "type AvgPool2d has no weights to balance"),
    Mistake("pool", replace(POOL, scale_w=(1.0, 1.0), offset_w=(0, 0)), "AvgPool2d has no weights; it takes one"),
    Mistake("rnn", replace(RNN, scale_h=None), "Cannot find scale_h of layer 'rnn' in record file"),
    Mistake("rnn", replace(RNN, offset_h=None), "Cannot find offset_h of layer 'rnn'"),
    Mistake("rnn", replace(RNN, scale_r=()), "scale_r is missing"),
    Mistake(
        "rnn", replace(RNN, scale_w=(0.1,), offset_w=(0,)), r"scale_w must have 4 or 8 values \(one per gate or per"
    ),
    Mistake("rnn", replace(RNN, scale_r=(0.1,) * 5, offset_r=(0,) * 5), "scale_r must have 4 or 8 values .* got 5"),
    Mistake("conv1", conv(offset_d=128), r"offset_d must lie in \[-128, 127\] for 8 bits, got 128", OUTSIDE),
    Mistake("conv1", conv(offset_d=-129), r"offset_d must lie in \[-128, 127\] for 8 bits, got -129", OUTSIDE),
    Mistake("conv1", conv(offset_d=40000, act_type="INT16"), r"\[-32768, 32767\] for 16 bits, got 40000", OUTSIDE),
    Mistake(
        "conv1",
        conv(offset_d=-128, dst_type="INT4", act_type=None, wts_type=None),
        r"offset_d must lie in \[-8, 7\] for 4 bits, got -128, as in the INT4 sample that AMCT's documents print",
        OUTSIDE,
    ),
    Mistake("conv1", conv(offset_d=8, act_type="INT4"), r"offset_d must lie in \[-8, 7\] for 4 bits, got 8", OUTSIDE),
    Mistake("rnn", replace(RNN, offset_h=300), "offset_h must lie in .* got 300", OUTSIDE),
    Mistake("conv1", conv(offset_w=(0, 0, 1, 0)), "offset_w must be 0, got 1: weights are quantized without", OUTSIDE),
    Mistake("pool", replace(POOL, offset_w=(2,)), "offset_w must be 0, got 2", OUTSIDE),
    Mistake("conv1", conv(scale_d=0.0), "scale_d must be greater than 0 and finite, got 0", OUTSIDE),
    Mistake("conv1", conv(scale_d=-1.0), "scale_d must be greater than 0 and finite, got -1", OUTSIDE),
    Mistake("conv1", conv(scale_d=float("nan")), "scale_d must be greater than 0 and finite, got nan", OUTSIDE),
    Mistake("conv1", conv(scale_w=(1.0, float("inf"), 1.0, 1.0)), "scale_w must be greater than 0 and .* inf", OUTSIDE),
    Mistake("rnn", replace(RNN, scale_r=(0.0,) * 4), "scale_r must be greater than 0", OUTSIDE),
    Mistake(
        "conv1",
        conv(tensor_balance_factor=(1.0,)),
        "tensor_balance_factor must have one value per input channel, that is 3, got 1",
        OUTSIDE,
    ),
    Mistake(
        "conv1",
        conv(tensor_balance_factor=(1.0, 1e-8, 1.0)),
        r"tensor_balance_factor must lie in \[1.19209e-07, 8.38861e\+06\], got 1e-08",
        OUTSIDE,
    ),
    Mistake("conv1", conv(tensor_balance_factor=(1.0, 1.0, 1e7)), "must lie in .* got 1e[+]07", OUTSIDE),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.message[:40])
def test_each_mistake_of_a_pytorch_record(mistake):
    with pytest.raises(RecordError, match=mistake.message) as caught:
        validate_record(Record({mistake.name: mistake.entry}), LAYERS)
    assert type(caught.value) is mistake.error
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ValueError) == (mistake.error is RecordValueError)
    assert len(caught.value.problems) == 1


def test_the_smallest_and_largest_legal_values_pass():
    for bits, kind in ((4, "INT4"), (8, "INT8"), (16, "INT16")):
        for offset in (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1):
            assert validate_record(Record({"conv1": conv(offset_d=offset, act_type=kind)}), LAYERS) == ()


def test_unknown_channel_counts_are_not_checked():
    layers = [RecordLayer(name="conv1", type="Conv2d")]
    entry = conv(scale_w=(1.0,) * 7, offset_w=(0,) * 7, tensor_balance_factor=(1.0,) * 5)
    assert validate_record(Record({"conv1": entry}), layers) == ()


def test_all_mistakes_come_together_with_their_places():
    text = (
        'record {\n  key: "conv1"\n  value {\n    scale_d: 0\n    offset_d: 300\n    scale_w: 1 offset_w: 0\n  }\n}\n'
        'record {\n  key: "nope"\n  value {\n    scale_d: 1\n  }\n}\n'
    )
    with pytest.raises(RecordValueError, match="3 mistakes:") as caught:
        validate_record(parse_record(text, "r.txt"), LAYERS)
    assert [str(problem).partition(": ")[0] for problem in caught.value.problems] == [
        "r.txt:4:5",
        "r.txt:5:5",
        "r.txt:9:1",
    ]


def test_a_layer_whose_calibration_is_not_complete_must_be_there():
    layers = [replace(layer, expected=layer.name in ("conv1", "fc")) for layer in LAYERS]
    with pytest.raises(RecordError, match="Cannot find scale_d of layer 'fc' in record file") as caught:
        validate_record(Record(GOOD), layers, progress={"fc": (1, 2)})
    assert len(caught.value.problems) == 1


def test_an_expected_layer_without_an_entry_stays_float_with_a_note():
    layers = [replace(layer, expected=layer.name in ("conv1", "fc")) for layer in LAYERS]
    [note] = validate_record(Record(GOOD), layers)
    assert str(note).endswith('layer "fc": the record has no entry for it, so it stays float')


@pytest.mark.parametrize(
    ("progress", "message"),
    [
        ((1, 2), r"seen 1 of 2 batches; run 1 more forward pass \(or lower batch_num\)"),
        ((0, 4), r"seen 0 of 4 batches; run 4 more forward passes \(or lower batch_num\)"),
        ((2, 2), "the entry is not complete; run calibration again"),
    ],
)
def test_a_missing_scale_tells_how_many_batches_are_missing(progress, message):
    with pytest.raises(RecordError, match=message):
        validate_record(Record({"conv1": conv(scale_d=None)}), LAYERS, progress={"conv1": progress})


@pytest.mark.parametrize("record", [Record(source="r.txt"), CaffeRecord(source="r.txt")])
def test_an_empty_record(record):
    with pytest.raises(RecordError, match=r"the record r.txt is empty, so there is no layer to quantize"):
        validate_record(record, LAYERS)


# -------------------------------------------------------------------------------------------------- kv cache, pruning


def test_a_good_kv_cache():
    record = Record({}, {"fc": KvCacheRecord(scale=(0.5,) * 10, offset=(1,) * 10)})
    assert validate_record(record, LAYERS) == ()
    assert validate_record(Record({}, {"fc": KvCacheRecord(scale=(0.5,), offset=(-128,))}), LAYERS) == ()


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        ("fd", KvCacheRecord(scale=(1.0,), offset=(0,)), r'layer "fd": the model has no such layer'),
        ("fc", KvCacheRecord(), "Cannot find scale of layer 'fc'"),
        ("fc", KvCacheRecord(scale=(1.0, 1.0), offset=(0,)), "2 scale but 1 offset in kv_cache_value"),
        ("fc", KvCacheRecord(scale=(1.0, 1.0), offset=(0, 0)), "kv_cache_value must have 1 or 10 scale, got 2"),
        ("fc", KvCacheRecord(scale=(0.0,), offset=(0,)), "scale must be greater than 0"),
        ("fc", KvCacheRecord(scale=(1.0,), offset=(128,)), "offset must lie in .* got 128"),
    ],
)
def test_each_mistake_of_a_kv_cache(name, entry, message):
    with pytest.raises(RecordError, match=message):
        validate_record(Record({}, {name: entry}), LAYERS)


def test_good_chains():
    chain = PruneRecord(
        producers=(PruneNode.channels("conv1", "Conv", 0, 4, (1, 3)),),
        consumers=(PruneNode.channels("relu", "Relu", 4, 8, (5, 7)),),
    )
    assert validate_record(Record(prune=(chain,)), LAYERS) == ()


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (PruneNode.channels("convl", "Conv", 0, 4), r'the model has no layer "convl"\. Did you mean "conv1"'),
        (PruneNode.channels("conv1", "Conv", 4, 4), "begin 4 must be below end 4"),
        (PruneNode.channels("conv1", "Conv", -1, 4), "begin -1 must be below end 4, and not negative"),
        (PruneNode.channels("conv1", "Conv", 4, 8, (5, 8)), r"prune_index 8 is not in the layer's channels 4\.\.7"),
        (
            PruneNode(name="fc", attributes=(Attribute.of("mask_shape", (70,)), Attribute.of("selective_mask", (1,)))),
            'prune_record: layer "fc": a mask of shape',
        ),
    ],
)
def test_each_mistake_of_a_chain(node, message):
    with pytest.raises(RecordError, match=message):
        validate_record(Record(prune=(PruneRecord(producers=(node,)),)), LAYERS)


# ------------------------------------------------------------------------------------------------------------- Caffe

CAFFE_LAYERS = (
    RecordLayer(name="conv1", type="Convolution", cout=3),
    RecordLayer(name="pool1", type="Pooling"),
    RecordLayer(name="fc1000", type="InnerProduct", cout=1000),
    RecordLayer(name="lstm", type="LSTM", cout=32, weight_blobs=2),
    RecordLayer(name="sum", type="Eltwise", inputs=2),
    RecordLayer(name="data", type="Input", quantizable=False),
)
DATA = DataFactors(index=0, scale=0.5, offset=-49, num_bits=8)
CAFFE_CONV = CaffeLayerRecord(scale_w=(0.1,) * 3, offset_w=(0,) * 3, num_bits_w=8, record_d=(DATA,))
CAFFE_FC = replace(CAFFE_CONV, scale_w=(0.1,), offset_w=(0,))
SUM = CaffeLayerRecord(record_d=(DATA, replace(DATA, index=1)))


def test_the_guides_sample_fits_a_model_and_loses_the_pooling_weights(golden):
    text = (golden / "record" / "caffe_guide.txt").read_text().replace("} record {", "}\n}\nrecord {")
    record = parse_caffe_record(text, "guide")
    notes = validate_record(record, CAFFE_LAYERS)
    assert [str(note) for note in notes] == [
        'guide:26:5: layer "pool1": type Pooling has no weights: scale_w and offset_w are ignored'
    ]
    normal = normalize_record(record, CAFFE_LAYERS)
    assert normal["pool1"] == replace(record["pool1"], scale_w=(), offset_w=())
    assert normal["fc1000"] == record["fc1000"]
    assert "scale_w: 1.0\n" not in format_record(normal)


def test_good_caffe_entries():
    record = CaffeRecord(
        {
            "conv1": replace(CAFFE_CONV, scale_w=(0.1,), offset_w=(0,), num_bits_w=4),
            "sum": SUM,
            "lstm": replace(CAFFE_CONV, scale_w=(0.1, 0.2), offset_w=(0, 0)),
            "pool1": CaffeLayerRecord(record_d=(replace(DATA, num_bits=16, offset=-32768),)),
        }
    )
    assert validate_record(record, CAFFE_LAYERS) == ()


def test_an_entry_may_belong_to_another_layer():
    record = CaffeRecord({"lstm_x": replace(CAFFE_FC, object_layer="lstm")})
    assert validate_record(record, CAFFE_LAYERS) == ()
    with pytest.raises(RecordError, match='layer "lstm_x": the model has no such layer'):
        validate_record(CaffeRecord({"lstm_x": replace(CAFFE_FC, object_layer="gone")}), CAFFE_LAYERS)


def caffe(**change: object) -> CaffeLayerRecord:
    return replace(CAFFE_CONV, **change)  # type: ignore[arg-type]


def data(**change: object) -> CaffeLayerRecord:
    return caffe(record_d=(replace(DATA, **change),))  # type: ignore[arg-type]


CAFFE_MISTAKES = [
    ("conv2", CAFFE_CONV, r'layer "conv2": the model has no such layer\. Did you mean "conv1"', RecordError),
    ("data", CAFFE_CONV, 'layer "data": a layer of type Input cannot be quantized here; remove its entry', RecordError),
    ("conv1", caffe(record_d=()), "Cannot find scale_d of layer 'conv1' in record file", RecordError),
    ("conv1", data(scale=None), "Cannot find scale_d of layer 'conv1' in record file", RecordError),
    ("conv1", data(offset=None), "Cannot find offset_d of layer 'conv1' in record file", RecordError),
    (
        "sum",
        replace(SUM, record_d=(DATA,)),
        r"Cannot find scale_d of layer 'sum' in record file \(input 1\)",
        RecordError,
    ),
    (
        "conv1",
        caffe(record_d=(DATA, replace(DATA, index=1))),
        "record_d has index 1, but the layer has 1 input",
        RecordError,
    ),
    (
        "sum",
        replace(SUM, record_d=(*SUM.record_d, replace(DATA, index=2))),
        "record_d has index 2, but the layer has 2 inputs",
        RecordError,
    ),
    ("conv1", data(num_bits=7), r"num_bits_d of input 0 must lie in 8\.\.16, got 7", RecordError),
    ("conv1", data(num_bits=17), r"num_bits_d of input 0 must lie in 8\.\.16, got 17", RecordError),
    ("conv1", caffe(num_bits_w=6), "num_bits_w must be 4 or 8, got 6", RecordError),
    ("conv1", caffe(scale_w=()), "scale_w is missing", RecordError),
    ("conv1", caffe(offset_w=(0,)), "3 scale_w but 1 offset_w", RecordError),
    ("conv1", caffe(scale_w=(0.1,) * 2, offset_w=(0,) * 2), "scale_w must have 1 or 3 values .* got 2", RecordError),
    ("fc1000", CAFFE_CONV, "scale_w must have 1 value, got 3: type InnerProduct is not quantized", RecordError),
    ("lstm", CAFFE_CONV, "scale_w must have 1 or 2 values, got 3: type LSTM is not", RecordError),
    ("sum", replace(SUM, scale_w=(1.0,), offset_w=(0,)), "type Eltwise has no weights; remove scale_w", RecordError),
    (
        "pool1",
        caffe(scale_w=(2.0,), offset_w=(0,)),
        "type Pooling has no weights; remove scale_w and offset_w",
        RecordError,
    ),
    ("conv1", data(offset=128), r"offset_d of input 0 must lie in \[-128, 127\] for 8 bits, got 128", OUTSIDE),
    ("conv1", data(offset=2048, num_bits=12), r"must lie in \[-2048, 2047\] for 12 bits, got 2048", OUTSIDE),
    ("conv1", data(scale=1e-8), r"scale_d of input 0 must lie in \[1.19209e-07, 8.38861e\+06\], got 1e-08", OUTSIDE),
    ("conv1", data(scale=1e7), "scale_d of input 0 must lie in .* got 1e[+]07", OUTSIDE),
    ("conv1", caffe(scale_w=(0.1, 0.0, 0.1)), "scale_w must lie in .* got 0", OUTSIDE),
    ("conv1", caffe(offset_w=(0, 3, 0)), "offset_w must be 0, got 3", OUTSIDE),
]


@pytest.mark.parametrize(("name", "entry", "message", "error"), CAFFE_MISTAKES)
def test_each_mistake_of_a_caffe_record(name, entry, message, error):
    with pytest.raises(RecordError, match=message) as caught:
        validate_record(CaffeRecord({name: entry}), CAFFE_LAYERS)
    assert type(caught.value) is error
    assert len(caught.value.problems) == 1


def test_a_caffe_layer_that_is_expected():
    layers = [replace(layer, expected=layer.name == "fc1000") for layer in CAFFE_LAYERS]
    with pytest.raises(RecordError, match="layer 'fc1000' in record file: calibration has seen 3 of 4 batches"):
        validate_record(CaffeRecord({"conv1": CAFFE_CONV}), layers, progress={"fc1000": (3, 4)})
