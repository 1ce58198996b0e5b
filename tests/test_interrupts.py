"""Ctrl-C ends the work although its KeyboardInterrupt was swallowed, or came when nobody could see it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from amct.data import AheadIterator
from amct.interrupts import raise_if_interrupted, remembered
from amct.log import track

posix_only = pytest.mark.skipif(os.name != "posix", reason="signals to one thread are a Unix thing")


def swallow():
    """As a package does that catches everything while it is imported."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return True
    return False


def test_a_swallowed_interrupt_is_raised_again():
    with remembered():
        raise_if_interrupted()
        assert swallow()
        with pytest.raises(KeyboardInterrupt):
            raise_if_interrupted()
    raise_if_interrupted()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def failing_import(is_interrupted):
    """As numba raises it when it is interrupted in its import."""
    with remembered():
        assert not is_interrupted or swallow()
        raise ImportError("numba._devicearray failed to import")


def test_an_error_in_place_of_the_interrupt():
    with pytest.raises(KeyboardInterrupt) as raised:
        failing_import(is_interrupted=True)
    assert isinstance(raised.value.__cause__, ImportError)
    with pytest.raises(ImportError):
        failing_import(is_interrupted=False)


def test_work_with_a_bar_ends_after_the_step():
    steps = track(range(5), "Working")
    with remembered():
        assert next(steps) == 0
        assert next(steps) == 1
        assert swallow()
        with pytest.raises(KeyboardInterrupt):
            next(steps)


def test_a_handler_of_the_user_is_kept():
    calls = []
    before = signal.signal(signal.SIGINT, lambda *_: calls.append("user"))
    try:
        with remembered():
            signal.raise_signal(signal.SIGINT)
            raise_if_interrupted()
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == ["user"]


def test_in_another_thread_nothing_is_remembered():
    errors = []

    def work():
        try:
            with remembered():
                raise_if_interrupted()
        except BaseException as error:  # noqa: BLE001  shown by the assertion
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []


@posix_only
def test_waiting_for_data_sees_a_signal_that_another_thread_got():
    """The system may hand a signal to any thread; the main one, asleep in a wait, is then not woken by it."""
    end = threading.Event()
    ended = []

    def items():
        time.sleep(0.5)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        ended.append(end.wait(20))
        yield "an item that nobody should wait for"

    ahead = AheadIterator(items())
    try:
        with pytest.raises(KeyboardInterrupt):
            next(ahead)
        assert ended == []  # the main thread was not woken by the end of the wait
    finally:
        end.set()
        ahead.close()


MODEL = """
import signal
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        if not torch.compiler.is_exporting() and self.calls > 1:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                print("swallowed")
        return self.fc(x)
"""


def test_the_command_ends_although_the_model_swallowed_the_interrupt(tmp_path):
    (tmp_path / "swallowing_net.py").write_text(MODEL)
    (tmp_path / "make.py").write_text("import numpy as np; np.save('x.npy', np.ones((6, 4), np.float32))")
    subprocess.run([sys.executable, "make.py"], cwd=tmp_path, check=True)
    arguments = ["quantize", "swallowing_net:Net", "--data", "x.npy", "--batch-size", "1", "-o", "out/net"]
    done = subprocess.run(
        [sys.executable, "-m", "amct", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "swallowed" in done.stdout, done.stderr
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "interrupted: nothing was left half-written"
    assert not (tmp_path / "out").exists()
