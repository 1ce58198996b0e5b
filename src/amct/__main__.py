"""``python -m amct`` is the command ``amct``; ``torchrun … -m amct`` runs it in several processes."""

from __future__ import annotations

import sys

from amct.cli import main

if __name__ == "__main__":
    sys.exit(main())
