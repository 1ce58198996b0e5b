"""The page of the results: a summary and one table."""

from __future__ import annotations

import importlib.util
import platform
import re
import statistics
from importlib import metadata
from typing import TYPE_CHECKING, Any

from amct.export.check.running import Speed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path

Row = dict[str, Any]
MARK = "<!-- the rest is written by benchmarks/zoo.py --table -->\n"
EXACT, NEAR, SLOW_NET = 200.0, 1.0, 1.0  # dB without noise, dB to the simulation, milliseconds
SPREAD = 0.06  # nine of ten repeated measurements of one file on a busy machine differ by less
PACKAGES = ("torch", "onnxruntime", "torchvision", "timm", "transformers")
EARLIER = "of an earlier version"
WORSE_WARNING, SLOWER_WARNING = "worse than the simulation", "slower than the float"


def write_page(path: Path, rows: Iterable[Row]) -> None:
    """Replace what follows the mark in the page."""
    from zoo_networks.registry import all_networks

    order = {network.name: place for place, network in enumerate(all_networks())}
    rows = sorted(rows, key=lambda row: order.get(row["name"], len(order)))
    head, _, before = path.read_text().partition(MARK)
    earlier = earlier_lines(before, {row["name"] for row in rows})
    missing = len(order.keys() - {row["name"] for row in rows} - set(earlier))
    partial = [f"{missing} of {len(order)} networks have no result yet."] if missing else []
    if earlier:
        partial.append(f"{len(earlier)} rows are {EARLIER} and not counted in the figures.")
    lines = [*table(rows), *earlier.values()]
    path.write_text(head + MARK + "\n".join(["", *partial, *summary(rows), "", *lines, ""]))


def earlier_lines(text: str, measured: Collection[str]) -> dict[str, str]:
    """The lines that a table has of networks which were not measured again, marked as such, by name."""
    found = {}
    for line in text.splitlines():
        name = line.removeprefix("| `").partition("`")[0] if line.startswith("| `") else ""
        if name and name not in measured:
            cells = line.removesuffix("|").rstrip()
            mark = f" {EARLIER}" if cells.endswith("|") else f"; {EARLIER}"
            found[name] = line if EARLIER in line else f"{cells}{mark} |"
    return found


def is_warned(row: Row, words: str) -> bool:
    """Whether the save warned of this."""
    return any(words in text for text in row.get("warnings", ()))


def is_worse(row: Row) -> bool:
    """Whether the file is more than 1 dB worse than the simulation."""
    values = row.get("file_sqnr"), row.get("simulation_sqnr")
    return None not in values and bool(values[0] < values[1] - NEAR)


def is_slower(row: Row) -> bool:
    """Whether the file is slower than the float file, by more than measurements of one file differ and users notice."""
    ours, original = row["ours_ms"], row["float_ms"]
    speed = Speed(ratio=original / ours, least=original / ours, nodes=(), seconds=ours / 1e3)
    return bool(ours > (1 + SPREAD) * original) and speed.matters(None)


def summary(rows: list[Row]) -> list[str]:
    """The wanted figures, as a table."""
    tried = [row for row in rows if row["outcome"] != "not installed"]
    clear = [row for row in tried if row["outcome"] in {"quantized", "refused"}]
    done = [row for row in tried if row["outcome"] == "quantized"]
    timed = [row for row in done if "ours_ms" in row]
    large = [row["float_ms"] / row["ours_ms"] for row in timed if row["float_ms"] > SLOW_NET]
    peer_large = [row["float_ms"] / row["peer_ms"] for row in timed if row["float_ms"] > SLOW_NET and "peer_ms" in row]
    both = [row for row in done if row.get("peer_sqnr") is not None and row["file_sqnr"] is not None]
    higher = sum(row["file_sqnr"] > row["peer_sqnr"] for row in both)
    chip = [row for row in done if None not in (row.get("deploy_sqnr"), row["file_sqnr"])]
    behind = _median([row["file_sqnr"] - row["deploy_sqnr"] for row in chip])
    worse = [row for row in done if is_worse(row)]
    slower = [row for row in timed if is_slower(row)]
    lines = [
        f"Measured with {versions()} on {processor()}, one thread.",
        "",
        "| figure | measured | wanted |",
        "| --- | ---: | ---: |",
        f"| networks tried | {len(tried)} | |",
        f"| quantized, or a clear error that names the cause | {len(clear)} ({len(clear) / len(tried):.1%}) | ≥ 97 % |",
        f"| of these quantized | {len(done)} | |",
        f"| file more than 1 dB worse than the simulation, with a warning | {_warned(worse, WORSE_WARNING)} | |",
        f"| the same without a warning | {_silent(worse, WORSE_WARNING)} | 0 |",
        f"| file slower than the float file, with a warning | {_warned(slower, SLOWER_WARNING)} | |",
        f"| the same without a warning | {_silent(slower, SLOWER_WARNING)} | 0 |",
        f"| median speed over float, {len(large)} networks above 1 ms | {_median(large):.2f} | ≥ 1.3 |",
        f"| the same of onnxruntime's quantizer, {len(peer_large)} networks | {_median(peer_large):.2f} | |",
        f"| median SQNR of our file, {len(both)} networks that both quantize | {_median_of(both, 'file_sqnr')} dB | |",
        f"| median SQNR of onnxruntime's file | {_median_of(both, 'peer_sqnr')} dB | |",
        f"| networks on which our file has the higher SQNR | {higher} of {len(both)} | |",
        f"| SQNR of our file minus that of the file for the chip, median of {len(chip)} | {behind:.1f} dB | ≤ 0.5 dB |",
        f"| median CPU time of quantize and save | {_median([row['job_seconds'] for row in done]):.1f} s | |",
    ]
    absent = len(rows) - len(tried)
    return [*lines, f"| not installed | {absent} | |"] if absent else lines


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def _median_of(rows: list[Row], key: str) -> str:
    return f"{_median([row[key] for row in rows]):.1f}"


def _warned(rows: list[Row], words: str) -> int:
    return sum(is_warned(row, words) for row in rows)


def _silent(rows: list[Row], words: str) -> int:
    return len(rows) - _warned(rows, words)


def versions() -> str:
    """The packages that matter."""
    present = [name for name in PACKAGES if importlib.util.find_spec(name)]
    return ", ".join(f"{name} {metadata.version(name).partition('+')[0]}" for name in present)


def processor() -> str:
    """The kind of processor."""
    try:
        with open("/proc/cpuinfo") as file:  # noqa: PTH123  not a file of the project
            lines = file.read().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        flags = next(line for line in lines if line.startswith("flags")).split()
        return f"{model} ({'with' if {'avx512_vnni', 'avx_vnni'} & set(flags) else 'without'} VNNI)"
    except (OSError, StopIteration):
        return platform.machine()


COLUMNS: dict[str, Callable[[Row], str]] = {
    "network": lambda row: f"`{row['name']}`",
    "layers": lambda row: f"{row['quantized']} of {row['quantized'] + row['left']}" if "left" in row else "",
    "simulation": lambda row: decibels(row, "simulation_sqnr"),
    "file": lambda row: decibels(row, "file_sqnr"),
    "ort": lambda row: decibels(row, "peer_sqnr"),
    "float": lambda row: f"{row['float_ms']:.2f} ms" if "float_ms" in row else "",
    "speed": lambda row: times(row, "ours_ms"),
    "ort speed": lambda row: times(row, "peer_ms"),
    "job": lambda row: f"{row['job_seconds']:.1f} s" if "job_seconds" in row else "",
    "note": lambda row: note(row),
}


def table(rows: list[Row]) -> list[str]:
    """One line per network."""
    ruler = ["---" if name in {"network", "note"} else "---:" for name in COLUMNS]
    lines = [" | ".join(COLUMNS), " | ".join(ruler)]
    lines += [" | ".join(column(row) for column in COLUMNS.values()) for row in rows]
    return [f"| {line} |" for line in lines]


def decibels(row: Row, key: str) -> str:
    """An SQNR."""
    value = row.get(key)
    if value is None:
        return ""
    return "exact" if value >= EXACT else "useless" if value <= -EXACT else f"{value:.1f}"


def times(row: Row, key: str) -> str:
    """A speed over float."""
    return f"{row['float_ms'] / row[key]:.2f}×" if key in row and "float_ms" in row else ""


def note(row: Row) -> str:
    """What went otherwise."""
    if row["outcome"] != "quantized":
        text = re.sub(r"/[\w./-]*/", "", row.get("error", "").strip().partition("\n")[0]).replace("|", "\\|")
        return f"{row['outcome']}: {text[:160]}" if text else row["outcome"]
    notes = []
    if is_worse(row):
        notes.append("worse, warned" if is_warned(row, WORSE_WARNING) else "worse")
    if "ours_ms" in row and is_slower(row):
        notes.append("slower, warned" if is_warned(row, SLOWER_WARNING) else "slower")
    if "peer_error" in row:
        notes.append("onnxruntime's quantizer fails")
    return "; ".join(notes)
