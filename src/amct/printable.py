"""Makes text from files safe to print: names of layers may contain escape sequences that control a terminal.

Everything that this package prints passes through ``printable`` or ``escaped``: commands, log lines, progress bars,
error messages and summaries.
"""

from __future__ import annotations

import re

LONGEST_LINE = 4000
LONGEST_WORD = 300
LONGEST_LAYER_NAME = 60
"""Of a layer, in a table."""
_CONTROLS = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f"  # C0 without tab and line feed, delete
    "\x80-\x9f"  # C1: one of them begins an escape sequence, as ESC [ does
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # change the direction of the text that follows
    "\u2028\u2029"  # line ends that are not seen as such
    "\ud800-\udfff"  # halves of characters, which cannot be encoded
    "]"
)


def escaped(text: str) -> str:
    r"""Replace characters that control a terminal by their escapes; in JSON the result has the same meaning.

    >>> escaped("conv\x1b[31m")
    'conv\\u001b[31m'
    """
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def printable(text: str) -> str:
    """Escape text for people, and shorten very long lines."""
    if len(text) > LONGEST_LINE:
        text = "\n".join(shortened(line, LONGEST_LINE) for line in text.split("\n"))
    return escaped(text)


def shortened(text: str, longest: int = LONGEST_WORD) -> str:
    """Leave out the middle of a text that is longer than ``longest`` characters.

    >>> shortened("0123456789" * 10, 40)
    '0123456789…(80 characters)…0123456789'
    """
    if len(text) <= longest:
        return text
    kept = max((longest - 20) // 2, 1)
    return f"{text[:kept]}…({len(text) - 2 * kept} characters)…{text[-kept:]}"


def counted(number: int, what: str) -> str:
    """A number of things, in the plural unless it is one: ``1 layer``, ``3 layers``, ``2 batches``."""
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith(('tch', 's')) else 's'}"
