"""The tokens of protobuf's text format, as regular expressions.

``STATEMENT`` matches a whole statement of the common form, ``TOKEN`` any single token. Each part matches in only one
way, so no input makes them backtrack for long.
"""

from __future__ import annotations

import re

CLOSERS = {"{": "}", "<": ">"}

_SKIP = r"\s*(?:\#[^\n]*(?:\n\s*|\Z))*"
"""Blanks and comments."""

_DIGITS = r"\.?[0-9](?:[eE][+-]|[\w.])*"
"""A digit with all adjoining letters, digits, dots and exponents; the field checks whether it is a number."""

STATEMENT = re.compile(
    _SKIP
    + r"""(?:
      ([A-Za-z_]\w*)\s*(?:
          (?::\s*)?([{<])
        | :\s*(?:
              "([^"\\\n]*)"(?!\s*["'\#])
            | '([^'\\\n]*)'(?!\s*["'\#])
            | ([A-Za-z_]\w*)
            | (-?DIGITS)
          )\s*[;,]?
      )
    | ([}>])\s*[;,]?
    )""".replace("DIGITS", _DIGITS),
    re.ASCII | re.VERBOSE,
)
NAME, OPEN, DOUBLE_QUOTED, SINGLE_QUOTED, WORD, NUMBER, CLOSE = range(1, 8)
"""The groups of ``STATEMENT``; a string is matched only when no escape and no further piece of it can follow."""

TOKEN = re.compile(
    _SKIP
    + r"""(?:
      (?P<word>[A-Za-z_]\w*)
    | (?P<number>DIGITS)
    | (?P<string>"[^"\\\n]*(?:\\.[^"\\\n]*)*" | '[^'\\\n]*(?:\\.[^'\\\n]*)*')
    | (?P<sign>[][{}<>:;,-])
    | (?P<end>\Z)
    | (?P<bad>.)
    )""".replace("DIGITS", _DIGITS),
    re.ASCII | re.VERBOSE,
)


def described(kind: str, token: str) -> str:
    """A token as a message shows it."""
    if kind == "end":
        return "the end of the file"
    shortened = token if len(token) <= 60 else f"{token[:57]}..."
    return f'"{shortened}"' if kind == "sign" else shortened
