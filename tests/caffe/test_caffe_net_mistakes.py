"""Nets in old forms, and nets that cannot be built: what Caffe aborts on is an error with the same words."""

from __future__ import annotations

import pytest
import torch

from amct.caffe import pycaffe as caffe
from amct.caffe.engine.messages import new_message
from amct.caffe.model import check_weights
from amct.errors import ModelError, ParseError, UnsupportedLayerError

V1 = """
input: "data" input_dim: 1 input_dim: 3 input_dim: 8 input_dim: 8
layers { name: "c" type: CONVOLUTION bottom: "data" top: "c"
  blobs_lr: 1 blobs_lr: 2 weight_decay: 1 weight_decay: 0 convolution_param { num_output: 2 kernel_size: 3 } }
layers { name: "s" type: SOFTMAX_LOSS bottom: "c" bottom: "lab" top: "loss" include { phase: TRAIN } }
layers { name: "p" type: SOFTMAX bottom: "c" top: "p" include { phase: TEST } }
"""


def test_v1_layers_and_input_fields(write):
    net = caffe.Net(write(V1), caffe.TEST)
    assert [(name, layer.type) for name, layer in zip(net._layer_names, net.layers, strict=True)] == [
        ("input", "Input"),
        ("c", "Convolution"),
        ("p", "Softmax"),
    ]
    assert net.blobs["data"].shape == (1, 3, 8, 8)
    assert [(p.rate, p.decay) for p in net.learnable] == [(1, 1), (2, 0)]


def test_two_inputs_make_one_layer(write):
    net = caffe.Net(
        write("""
input: "a" input_shape { dim: 1 dim: 2 } input: "b" input_shape { dim: 3 }
layer { name: "r" type: "ReLU" bottom: "a" top: "r" } layer { name: "q" type: "ReLU" bottom: "b" top: "q" }
"""),
        caffe.TEST,
    )
    assert (net.inputs, list(net._layer_names)) == (["a", "b"], ["input", "r", "q"])
    assert net.blobs["b"].shape == (3,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (V1 + 'layer { name: "x" type: "ReLU" bottom: "p" top: "x" }', "includes both 'layer' and 'layers' fields"),
        ('input: "a" input_dim: 1 input_dim: 2', "need 4 input_dim each, 4 in all, got 2"),
        ('input: "a" input: "b" input_shape { dim: 1 }', "2 input field.s. but 1 input_shape"),
    ],
)
def test_old_forms_that_cannot_be_upgraded(write, text, message):
    with pytest.raises(ModelError, match=message):
        caffe.Net(write(text), caffe.TEST)


INPUT = 'layer { name: "a" type: "Input" top: "d" input_param { shape { dim: 1 dim: 3 dim: 6 dim: 6 } } } '


def one(type_name, options):
    """The input and one layer on it."""
    return INPUT + f'layer {{ name: "c" type: "{type_name}" bottom: "d" top: "c" {options} }}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'layer { name: "x" type: "NoSuch" top: "y" }',
            r'layer "x" \(NoSuch\): Unknown layer type: "NoSuch".*Known types: .*register_caffe_layer\("NoSuch"\)',
        ),
        ('layer { name: "x" type: "Convolutio" top: "y" }', 'Did you mean "Convolution"'),
        (
            'layer { name: "x" type: "ReLU" bottom: "q" top: "y" }',
            r"Unknown bottom blob 'q' \(layer 'x', bottom index 0\)",
        ),
        (INPUT + 'layer { name: "b" type: "Input" top: "d" }', "Top blob 'd' produced by multiple sources"),
        (
            one("Convolution", "convolution_param { kernel_size: 3 }"),
            "num_output must be > 0",
        ),
        (
            one("Convolution", "convolution_param { num_output: 2 }"),
            "kernel_size must be specified once",
        ),
        (
            one("Convolution", "convolution_param { num_output: 2 kernel_size: 9 }"),
            r"the kernel \(9, 9\) is larger than the input \(1, 3, 6, 6\)",
        ),
        (
            one("Convolution", "convolution_param { num_output: 4 kernel_size: 1 group: 2 }"),
            "group 2 does not divide the 3 input channels",
        ),
        (
            'layer { name: "a" type: "Input" top: "d" include { phase: TEST } exclude { phase: TRAIN } }',
            "Specify either include rules or exclude rules; not both",
        ),
        (
            INPUT + 'layer { name: "e" type: "Eltwise" bottom: "d" top: "e" }',
            r"Eltwise Layer takes at least 2 bottom blob\(s\) as input",
        ),
        (
            INPUT + 'layer { name: "e" type: "AbsVal" bottom: "d" top: "d" }',
            "AbsVal Layer does not allow in-place computation",
        ),
        (
            one("BatchNorm", "param { lr_mult: 1 }"),
            "Cannot configure batch normalization statistics",
        ),
        (
            one("InnerProduct", "param { } param { } param { } inner_product_param { num_output: 1 }"),
            "Too many params specified for layer c",
        ),
        (
            one("Pooling", "pooling_param { kernel_size: 2 pad: 2 }"),
            r"pad \(2, 2\) must be smaller than the kernel",
        ),
        (
            one("Pooling", "pooling_param { }"),
            "one of them is required",
        ),
        (
            one("LRN", "lrn_param { local_size: 4 }"),
            "only supports odd values",
        ),
        (
            one("Softmax", "softmax_param { axis: 4 }"),
            "axis 4 is out of range for a blob of 4 axes",
        ),
        (
            INPUT + 'layer { name: "c" type: "Slice" bottom: "d" top: "x" top: "y" }',
            r"Number of top blobs \(2\) should evenly divide input slice axis \(3\)",
        ),
        (
            INPUT
            + 'layer { name: "c" type: "Reshape" bottom: "d" top: "x" reshape_param { shape { dim: 5 dim: -1 } } }',
            "must be divisible",
        ),
        (
            INPUT + 'layer { name: "c" type: "ReLU" bottom: "d" top: "x" loss_weight: 1 loss_weight: 1 }',
            "loss_weight must be unspecified or specified once per top",
        ),
        (
            INPUT + 'layer { name: "c" type: "ReLU" bottom: "d" top: "x" propagate_down: true propagate_down: true }',
            "propagate_down param must be specified either 0 or bottom_size",
        ),
        (
            INPUT + 'layer { name: "c" type: "ReLU" bottom: "d" top: "x" top: "y" }',
            r"ReLU Layer produces 1 top blob\(s\) as output",
        ),
        (
            one("InnerProduct", 'inner_product_param { num_output: 4 weight_filler { type: "foo" } }'),
            'Unknown filler name: "foo"',
        ),
    ],
)
def test_what_caffe_aborts_on_is_an_error_with_the_same_words(write, text, message):
    with pytest.raises(ModelError, match=message):
        caffe.Net(write(text), caffe.TEST)


def test_unparsable_prototxt_gives_line_and_column(write):
    with pytest.raises(ParseError, match=r'net\.prototxt:1:19.*typ.*Did you mean "type"'):
        caffe.Net(write('layer { name: "x" typ: "ReLU" }'), caffe.TEST)


SHARED = """
layer {{ name: "in" type: "Input" top: "d" input_param {{ shape {{ dim: 1 dim: 3 }} }} }}
layer {{ name: "x" type: "InnerProduct" bottom: "d" top: "a" param {{ name: "w" {first} }}
  inner_product_param {{ num_output: 3 }} }}
layer {{ name: "y" type: "InnerProduct" bottom: "a" top: "b" param {{ name: "w" {second} }}
  inner_product_param {{ num_output: {size} }} }}
"""


def test_shared_parameters_must_agree(write):
    with pytest.raises(
        ModelError,
        match=r"Cannot share param 'w' owned by layer 'x' with layer 'y'; shape mismatch\.  "
        r"Owner layer param shape is 3 3 \(9\); sharing layer expects shape 4 3 \(12\)",
    ):
        caffe.Net(write(SHARED.format(first="", second="", size=4)), caffe.TEST)
    with pytest.raises(ModelError, match="count mismatch"):
        caffe.Net(write(SHARED.format(first="", second="share_mode: PERMISSIVE", size=4)), caffe.TEST)
    with pytest.raises(ModelError, match=r"Shared param 'w' has mismatched lr_mult: 1\.0 and 2\.0"):
        caffe.Net(write(SHARED.format(first="lr_mult: 1", second="lr_mult: 2", size=3)), caffe.TEST)


# ------------------------------------------------------------------ messages of other forks


FORK = """name: "fork"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 } } }  # a } in a comment
layer {
  name: "warp { me"
  bottom: "data"
  top: "warp"
  warp_param { height: 3 mode: FAST note: "}" }
  type: "Warp"
}
layer { name: "pool" type: "Pooling" bottom: "warp" top: "pool" pooling_param { kernel_siez: 2 } }
"""


def test_an_unknown_parameter_names_its_layer_its_type_its_line_and_the_remedy(tmp_path):
    path = tmp_path / "fork.prototxt"
    path.write_text(FORK)
    with pytest.raises(ParseError) as caught:
        caffe.Net(str(path), caffe.TEST)
    first, second = map(str, caught.value.problems)
    assert first.startswith(f"{path}:7:3: LayerParameter has no field warp_param.")
    assert 'It is in layer "warp { me" of type "Warp"' in first
    assert "remove it" in first
    assert "--custom-proto" in first
    assert 'amct.extend.register_caffe_layer("Warp"' in first
    assert second.startswith(f"{path}:10:81: PoolingParameter has no field kernel_siez.")
    assert second.endswith('It is in layer "pool" of type "Pooling".')


def test_lists_of_types_show_no_internal_names(tmp_path):
    path = tmp_path / "net.prototxt"
    path.write_text('layer { name: "a" type: "Convolution on integer" }')
    with pytest.raises(UnsupportedLayerError) as caught:
        caffe.Net(str(path), caffe.TEST)
    shown = str(caught.value)
    assert "on integers" not in shown
    assert "refreshed" not in shown
    assert ", Convolution, " in shown


@pytest.mark.parametrize("kind", ["Convolution", "Deconvolution"])
@pytest.mark.parametrize("shape", [(), (4,)])
def test_weights_of_too_few_axes(kind, shape):
    layer = new_message("LayerParameter", name="l", type=kind, bottom=["a"], top=["b"])
    layer.convolution_param.bias_term = False
    with pytest.raises(ModelError, match="Do model and weights belong together"):
        check_weights(layer, [torch.zeros(shape)], "x.caffemodel")
