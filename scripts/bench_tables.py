"""Print the rows of all benchmarks, mark those that are missed, and write them into ``docs/benchmarks.md``.

    python scripts/bench_tables.py                          print
    python scripts/bench_tables.py docs/benchmarks.md       and replace the tables of the page

A benchmark writes ``benchmarks/results/<name>.json`` with ``rows``: what was measured, the value, what is wanted, and
whether that is kept (null: there is no goal). Its table in the page stands between ``<!-- rows of <name> -->`` and
``<!-- end -->``; a benchmark that was not run, or only in part (``"partial": true``), keeps the table it has. A goal
(``GOALS``) that no benchmark has measured is listed too. The exit code is 1 if a row is missed or not measured.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- rows of (?P<name>\w+) -->\n)(?P<table>.*?)(<!-- end -->)", re.DOTALL)
MARKS = {True: "yes", False: "**missed**", None: ""}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of a benchmark; ``kept`` is None where there is no goal."""

    what: str
    measured: str
    wanted: str = ""
    kept: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Results:
    """The rows of one benchmark, and whether only some of its parts were run."""

    rows: tuple[Row, ...]
    partial: bool = False


@dataclass(frozen=True)
class Goal:
    """A row that must be measured: by which benchmark, and words that are all in its name."""

    benchmark: str
    words: tuple[str, ...]

    def is_measured(self, results: dict[str, Results]) -> bool:
        """Whether a row of the results is that of the goal."""
        found = results.get(self.benchmark)
        return found is not None and any(all(word in row.what for word in self.words) for row in found.rows)


GOALS = (
    Goal("ptq_pytorch", ("calibration ÷",)),
    Goal("ptq_pytorch", ("whole job: ours",)),
    Goal("ptq_pytorch", ("AdaRound fast", "whole job")),
    *(Goal("ptq_caffe", ("speed", net)) for net in ("SqueezeNet", "open_nsfw")),
    *(Goal("ptq_caffe", ("memory", net, "batches of 4")) for net in ("SqueezeNet", "open_nsfw")),
    Goal("scaling", ("1 rank ÷ on 2 ranks",)),
    *(
        Goal("depth", (step, "for each", things))
        for step in ("quantize", "save", "report")
        for things in ("layer", "weight")
    ),
    *(
        Goal("caffe_engine", (net, f"batch {batch}", threads))
        for net in ("SqueezeNet", "open_nsfw", "ResNet-50", "RFB-320")
        for batch in (1, 8)
        for threads in ("1 thread:", "2 threads:")
    ),
    *(Goal("caffe_small", (net,)) for net in ("LeNet", "det1", "det2", "det3")),
    *(Goal("qdq_speed", (net, "speed")) for net in ("ResNet-20", "SqueezeNet", "EfficientNet-Lite0", "MiniLM")),
    *(Goal("job_shares", (net, "report")) for net in ("ResNet-20", "open_nsfw")),
    *(Goal("portable_weights", (net, "bounded")) for net in ("ResNet-20", "EfficientNet-Lite0")),
)
"""The goals for speed and memory, and those for the weights of the portable file."""


def read_results(folder: Path) -> dict[str, Results]:
    """The rows of every benchmark that was run, by its name; a file without ``rows`` is left out."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        document: Any = json.loads(path.read_text())
        if isinstance(document, dict) and "rows" in document:
            rows = tuple(Row(**row) for row in document["rows"])
            found[path.stem] = Results(rows=rows, partial=bool(document.get("partial")))
    return found


def markdown(rows: tuple[Row, ...]) -> str:
    """A table of rows."""
    lines = ["| what | measured | wanted | kept |", "| --- | --- | --- | --- |"]
    for row in rows:
        cells = (row.what, row.measured, row.wanted, MARKS[row.kept])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def with_tables(page: str, results: dict[str, Results]) -> str:
    """The page with the tables of the benchmarks that were run as a whole.

    Raises:
        ValueError: A benchmark has rows and the page has no place for them.
    """
    places = {match["name"] for match in BLOCK.finditer(page)}
    missing = sorted(set(results) - places)
    if missing:
        raise ValueError(f'the page has no "<!-- rows of {missing[0]} -->": add it, with "<!-- end -->" behind it')

    def replaced(match: re.Match[str]) -> str:
        found = results.get(match["name"])
        if found is None or found.partial:
            return match[0]
        return f"{match[1]}{markdown(found.rows)}{match[4]}"

    return BLOCK.sub(replaced, page)


def main() -> int:
    """Print all rows; write the page if one is named."""
    results = read_results(RESULTS)
    lines = []
    for name, found in results.items():
        lines.append(f"{name}{' (in part)' if found.partial else ''}")
        for row in found.rows:
            mark = {True: "kept  ", False: "MISSED", None: "      "}[row.kept]
            lines.append(f"  {mark}  {row.what}: {row.measured}{f'   wanted {row.wanted}' if row.wanted else ''}")
    missed = sum(row.kept is False for found in results.values() for row in found.rows)
    unmeasured = [goal for goal in GOALS if not goal.is_measured(results)]
    lines += [f"NOT MEASURED  {', '.join(goal.words)}: python benchmarks/{goal.benchmark}.py" for goal in unmeasured]
    sys.stdout.write("\n".join([*lines, f"{missed} missed, {len(unmeasured)} not measured", ""]))
    if len(sys.argv) > 1:
        page = Path(sys.argv[1])
        page.write_text(with_tables(page.read_text(), results))
    return 1 if missed or unmeasured else 0


if __name__ == "__main__":
    sys.exit(main())
