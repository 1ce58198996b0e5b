"""Inputs made from a seed: images with the statistics of photographs, pictures of text, sound, tokens."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

Array = np.ndarray
MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LETTERS = "the quick brown fox jumps over lazy dogs 0123456789 Invoice Total: 48.20"


def leaves(rng: np.random.Generator, height: int, width: int) -> Array:
    """An image of overlapping discs and boxes (the dead leaves model), which has edges and a 1/f spectrum."""
    image = Image.new("RGB", (width, height), tuple(rng.integers(0, 256, 3).tolist()))
    draw = ImageDraw.Draw(image)
    for radius in np.sort(rng.pareto(1.5, 120) + 1)[::-1] * max(height, width) / 40:
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        box = (x - radius, y - radius * rng.uniform(0.5, 2), x + radius, y + radius)
        colour = tuple(np.clip(rng.normal(rng.uniform(40, 215), 35, 3), 0, 255).astype(int).tolist())
        (draw.ellipse if rng.random() < 0.7 else draw.rectangle)(
            (min(box[0], box[2]), min(box[1], box[3]), max(box[0], box[2]), max(box[1], box[3])), fill=colour
        )
    pixels = np.asarray(image, np.float32) + rng.normal(0, 4, (height, width, 1))
    return np.clip(pixels, 0, 255).astype(np.float32) / 255


def images(count: int, size: int | tuple[int, int], seed: int, *, normalized: bool = True) -> Array:
    """Colour images, ``count × 3 × height × width``; normalized as for ImageNet, else from 0 to 1."""
    height, width = (size, size) if isinstance(size, int) else size
    rng = np.random.default_rng(seed)
    pixels = np.stack([leaves(rng, height, width) for _ in range(count)])
    if normalized:
        pixels = (pixels - MEAN) / SPREAD
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2), np.float32)


def text_images(count: int, size: tuple[int, int], seed: int, *, lines: int = 1, channels: int = 3) -> Array:
    """Pictures of printed lines of text, from -1 to 1, ``count × channels × height × width``."""
    height, width = size
    rng = np.random.default_rng(seed)
    pictures = []
    for _ in range(count):
        paper = int(rng.integers(170, 256))
        image = Image.new("L", (width, height), paper)
        draw = ImageDraw.Draw(image)
        for line in range(lines):
            start = int(rng.integers(0, len(LETTERS) - 12))
            place = (float(rng.uniform(0, width / 8)), height * line / lines)
            font_size = max(8, int(height / lines * rng.uniform(0.45, 0.8)))
            draw.text(place, LETTERS[start : start + 40], fill=int(rng.integers(0, 90)), font_size=font_size)
        noisy = np.asarray(image, np.float32)[None] + rng.normal(0, 5, (channels, height, width))
        pictures.append(np.clip(noisy, 0, 255) / 127.5 - 1)
    return np.stack(pictures).astype(np.float32)


def sound(count: int, samples: int, seed: int, rate: int = 16000) -> Array:
    """Voiced and unvoiced stretches: harmonics of a gliding pitch under an envelope, and noise; within -1 to 1."""
    rng = np.random.default_rng(seed)
    time = np.arange(samples) / rate
    waves = []
    for _ in range(count):
        pitch = rng.uniform(90, 240) * (1 + 0.1 * np.sin(2 * np.pi * rng.uniform(1, 4) * time))
        phase = 2 * np.pi * np.cumsum(pitch) / rate
        formants = rng.uniform(1, 12, 2)
        voice = sum(np.sin(k * phase) * np.exp(-np.min((k - formants) ** 2) / 8) for k in range(1, 20))
        envelope = np.clip(np.sin(2 * np.pi * rng.uniform(2, 5) * time + rng.uniform(0, 6)), 0, None)
        waves.append(0.15 * voice * envelope + 0.01 * rng.normal(size=samples))
    return np.clip(np.stack(waves), -1, 1).astype(np.float32)


def spectrum(shape: tuple[int, ...], seed: int) -> Array:
    """Log spectra: smooth over time and frequency, with noise; mean about -4, as of quiet speech."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape)
    for axis in (len(shape) - 2, len(shape) - 1):
        values = values + np.roll(values, 1, axis) + np.roll(values, 2, axis)
    return (values / 2 - 4).astype(np.float32)


def tokens(shape: tuple[int, ...], vocabulary: int, seed: int) -> Array:
    """Token numbers from 3 on, with the frequencies of words (Zipf's law)."""
    ranks = np.random.default_rng(seed).zipf(1.3, shape)
    return (3 + ranks % (vocabulary - 3)).astype(np.int64)
