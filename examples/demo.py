"""What ``make demo`` runs: a Caffe LeNet and a PyTorch CNN learn handwritten digits, are quantized, and are compared.

Everything shown is computed here and now, from training to the accuracy of the INT8 files in onnxruntime. It takes less
than a minute on two cores. The two examples are ``caffe_lenet.py`` and ``pytorch_cnn.py``: read those first.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from measuring import Example, Figures


# Set before torch is imported: networks this small gain nothing from more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("AMCT_LOG_LEVEL", "ERROR")  # the demo prints its own lines


@contextmanager
def step(console: Console, text: str) -> Iterator[None]:
    """Show a spinner during a step and a line with its time afterwards; only the line if piped."""
    begin = time.perf_counter()
    with console.status(text):
        yield
    console.print(f"  {text:<56} {time.perf_counter() - begin:5.1f} s", highlight=False)


def run_examples(folder: Path, console: Console) -> list[Example]:
    """Train and quantize both networks."""
    with step(console, "loading torch, onnxruntime and amct"):
        import caffe_lenet
        import pytorch_cnn

    data = caffe_lenet.load_digits()
    with step(console, f"Caffe LeNet: its solver learns {len(data.labels)} digits"):
        weights = caffe_lenet.train(data, folder)
    with step(console, "Caffe LeNet: quantize, compare, report"):
        lenet = caffe_lenet.quantize(weights, data, folder)
    data = pytorch_cnn.load_digits()
    with step(console, f"PyTorch CNN: learns {len(data.labels)} digits"):
        model = pytorch_cnn.train(data)
    with step(console, "PyTorch CNN: quantize, compare, report"):
        cnn = pytorch_cnn.quantize(model, data, folder)
    return [lenet, cnn]


def table_of(examples: list[Example], figures: list[tuple[Figures, Figures]]) -> Table:
    """One table with a column for each network."""
    images = len(examples[0].data.test_labels)
    table = Table(title=f"{images} test digits in onnxruntime, one thread", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for example in examples:
        table.add_column(example.title, justify="right", overflow="fold")
    add_pair(table, "accuracy", [[f"{file.accuracy:.2f} %" for file in pair] for pair in figures])
    add_pair(table, "file", [[f"{file.size / 1000:.0f} kB" for file in pair] for pair in figures])
    add_pair(table, "64 images", [[f"{file.latency:.2f} ms" for file in pair] for pair in figures])
    table.add_row("most harmed layer", *(example.most_harmed for example in examples), end_section=True)
    table.add_row("report", *(str(example.report) for example in examples))
    return table


def add_pair(table: Table, name: str, pairs: list[list[str]]) -> None:
    """A line for the float file and one for the INT8 file."""
    table.add_row(f"{name}, float", *(of_float for of_float, _ in pairs))
    table.add_row(f"{name}, INT8 (QDQ)", *(of_int8 for _, of_int8 in pairs), end_section=True)


def main() -> int:
    """Train, quantize, measure and show the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/demo"), help="where the files go")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    begin = time.perf_counter()
    examples = run_examples(folder, console)
    with step(console, "measuring the float and the INT8 files"):
        from measuring import measure

        figures = [measure(example) for example in examples]
    table = table_of(examples, figures)
    console.print(table)
    with (folder / "table.txt").open("w", encoding="utf-8") as file:  # `make pictures` puts it into the README
        Console(file=file, width=80).print(table)
    took = f"{time.perf_counter() - begin:.0f} seconds"
    console.print(f"All files are in {folder}; the reports open in any browser. It took {took}.", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
