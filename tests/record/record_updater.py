"""A program that the tests start several times: ``python record_updater.py FILE WORKER COUNT``."""

from __future__ import annotations

import sys

from amct.record import LayerRecord, update


def entry_of(worker: str, step: int) -> LayerRecord:
    return LayerRecord(
        scale_d=(step + 1) / 7, offset_d=step % 100, scale_w=(0.5, 0.25), offset_w=(0, 0), act_type=worker
    )


def work(file: str, worker: str, count: int) -> None:
    """Give ``count`` layers an entry each, and one more layer a new entry at every step."""
    for step in range(count):
        update(file, f"{worker}.{step}" if step % 2 else f"{worker}.counter", entry_of(worker, step))


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], int(sys.argv[3]))
