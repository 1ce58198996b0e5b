"""The size of the house: lines of code by room, and the files that three small jobs enter.

``python scripts/house.py`` prints both; ``--lines`` only the first, which takes some seconds. Lines are those of
``src/**/*.py`` without blank lines, comments and docstrings. A file is entered when one of its functions is called in
the second run of a job, so that imports and caches do not count.
"""

from __future__ import annotations

import argparse
import ast
import io
import logging
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "src"
LONGEST = 8
"""So many of the largest rooms are listed."""
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}

SMALL_NET = """
name: "small"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
        convolution_param { num_output: 8 kernel_size: 3 pad: 1 } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "fc" type: "InnerProduct" bottom: "conv" top: "fc" inner_product_param { num_output: 4 } }
"""


def say(line: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{line}\n")


def code_lines(path: Path) -> int:
    """The lines of a file that hold code."""
    source = path.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        for statement in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                lines.difference_update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return len(lines)


def print_lines() -> None:
    """Print lines of code and files, in all and by room."""
    rooms: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in SOURCES.rglob("*.py"):
        room = "/".join(path.relative_to(SOURCES).parts[:2]).removesuffix(".py")
        rooms[room] += code_lines(path)
        files[room] += 1
    say(f"{rooms.total()} lines of code in {files.total()} files")
    for room, lines in rooms.most_common(LONGEST):
        say(f"  {room:24} {lines:6} lines {files[room]:4} files")


def pytorch_job(folder: Path) -> None:
    """Quantize and save a small module."""
    import torch

    import amct.pytorch

    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten()
    )
    model = torch.nn.Sequential(model, torch.nn.Linear(512, 4)).eval()
    batches = [torch.randn(2, 3, 8, 8) for _ in range(3)]
    amct.pytorch.quantize(model, batches).save(folder / "small")


def caffe_job(folder: Path) -> None:
    """Quantize and save a small Caffe net."""
    import numpy as np

    import amct.caffe
    from amct.caffe import pycaffe

    prototxt, weights = folder / "small.prototxt", folder / "small.caffemodel"
    if not weights.exists():
        prototxt.write_text(SMALL_NET)
        pycaffe.Net(str(prototxt), pycaffe.TEST).save(str(weights))
    batches = [np.random.default_rng(seed).normal(size=(2, 3, 8, 8)).astype("float32") for seed in range(3)]
    amct.caffe.quantize(prototxt, weights, batches).save(folder / "small")


def qat_job(folder: Path) -> None:
    """Train a small module with quantizers for two steps, and save it."""
    import torch

    import amct.pytorch

    batches = [torch.randn(2, 3, 8, 8) for _ in range(3)]
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten()
    )
    trained = amct.pytorch.prepare_qat(torch.nn.Sequential(model, torch.nn.Linear(512, 4)), batches)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    trained.train()
    for batch in batches[:2]:
        optimizer.zero_grad()
        trained(batch).square().mean().backward()
        optimizer.step()
    trained.save(folder / "small")


JOBS = {"PyTorch": pytorch_job, "Caffe": caffe_job, "QAT": qat_job}


def entered(name: str) -> list[str]:
    """The files of this package whose functions a job calls in its second run, in the order of the first calls."""
    seen: dict[str, None] = {}

    def note(frame: object, event: str, _argument: object) -> None:
        if event == "call":
            seen.setdefault(frame.f_code.co_filename)  # type: ignore[attr-defined]

    sys.path.insert(0, str(SOURCES))
    with tempfile.TemporaryDirectory() as folder:
        JOBS[name](Path(folder))
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            JOBS[name](Path(folder))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return [Path(file).relative_to(SOURCES).as_posix() for file in seen if Path(file).is_relative_to(SOURCES)]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", action="store_true", help="only lines and files")
    parser.add_argument("--list", choices=JOBS, help="the files that one job enters, in this order")
    arguments = parser.parse_args()
    if arguments.list:
        say("\n".join(entered(arguments.list)))
        return
    print_lines()
    if not arguments.lines:
        logging.disable()
        for name in JOBS:
            say(f"  a small {name} job enters {len(entered(name))} files")


if __name__ == "__main__":
    main()
