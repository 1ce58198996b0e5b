"""``python -m amct`` is the command ``amct``; ``torchrun … -m amct`` runs it in several processes."""

from __future__ import annotations

import sys

if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has no such flag
    sys.path.append(sys.path.pop(0))  # the working folder: a file in it must not replace an installed package

from amct.cli import main

if __name__ == "__main__":
    sys.exit(main())
