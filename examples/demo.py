"""What ``make demo`` runs."""

from __future__ import annotations

import sys

import amct


def main() -> int:
    """Say what there is to see."""
    print(f"amct {amct.__version__}: nothing to show yet. The flows that quantize a whole network are not in place.")
    print("What works today is in README.md; try `.venv/bin/amct --help`.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
