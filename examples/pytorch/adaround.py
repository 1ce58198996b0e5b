"""AdaRound: learn whether each weight is rounded up or down, to 3 bits: ``python examples/pytorch/adaround.py``."""

from __future__ import annotations

from shared import accuracy, calibration_batches, trained_network

import amct.pytorch as amct
from amct.pytorch import AdaRoundSettings, LayerConfig, QuantConfig

BITS = 3  # at 8 bits, and even at 4, rounding to the nearest integer loses nothing here
ITERATIONS = 500  # after 150 the accuracy still rises


def quantized_accuracy(iterations: int) -> float:
    """The accuracy with quantized weights and 8-bit activations, simulated in torch; 0 iterations learn nothing."""
    weights = LayerConfig(weights=AdaRoundSettings(num_bits=BITS, num_iteration=iterations))
    config = QuantConfig(types={"Conv2d": weights})
    return accuracy(amct.quantize(trained_network(), calibration_batches(), config).model)


def main() -> None:
    """Compare rounding to the nearest integer with learned rounding."""
    print(f"float                                {accuracy(trained_network()):6.2f} %")
    print(f"{BITS}-bit weights, nearest integer       {quantized_accuracy(0):6.2f} %")
    print(f"{BITS}-bit weights, AdaRound              {quantized_accuracy(ITERATIONS):6.2f} %")


if __name__ == "__main__":
    main()
