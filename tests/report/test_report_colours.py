"""The colours of the report can be told apart with every colour vision, in light, dark and print."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest

from amct.report.page import resource

# Colour vision deficiencies of full severity in linear RGB (Machado, Oliveira and Fernandes, 2009).
VISIONS = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = TO_XYZ.sum(axis=1)
CLEARLY_DIFFERENT = 10  # CIE76; about 2.3 is just noticeable


def lab(colour: str, vision: object) -> np.ndarray:
    values = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    x, y, z = (TO_XYZ @ np.clip(np.array(vision) @ linear, 0, 1)) / WHITE
    fx, fy, fz = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z))
    return np.array([116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)])


@pytest.mark.parametrize("vision", VISIONS)
def test_classes_of_sqnr_are_clearly_different(vision):
    schemes = re.findall(r"--q3: (#\w+); --q2: (#\w+); --q1: (#\w+); --q0: (#\w+);", resource("page.css"))
    assert len(schemes) == 3  # light, dark, print
    for scheme in schemes:
        places = [lab(colour, VISIONS[vision]) for colour in scheme]
        assert min(np.linalg.norm(one - other) for one, other in combinations(places, 2)) > CLEARLY_DIFFERENT
