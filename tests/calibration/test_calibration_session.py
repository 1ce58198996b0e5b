"""The calibration session: counting, ending, errors with the layer's name, and independence of other sessions."""

from __future__ import annotations

import gc
import logging
import pickle
import sys
import weakref
from contextlib import suppress

import pytest
import torch

from amct.calibration import CalibrationSession, Stream, make_observer
from amct.calibration.session import HIDDEN, OPEN_ENDED
from amct.errors import ArgumentError, CalibrationError
from amct.numerics.affine import SymmetricScale
from amct.numerics.hfmg import HfmgObserver
from amct.numerics.ifmr import IfmrObserver
from amct.numerics.observer import MinMaxObserver
from amct.numerics.settings import HfmgSettings, IfmrSettings


def stream(layer, batch_num=1, **more):
    return Stream(layer=layer, settings=IfmrSettings(), batch_num=batch_num, **more)


def data(seed, size=200):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def factors_of(*tensors, settings=None):
    observer = make_observer(settings or IfmrSettings())
    for tensor in tensors:
        observer.observe(tensor)
    return observer.result()


def test_observers_follow_the_settings():
    ifmr = make_observer(
        IfmrSettings(
            num_bits=16,
            asymmetric=False,
            max_percentile=0.9,
            min_percentile=0.8,
            search_range=(0.5, 1.5),
            search_step=0.1,
        ),
        channel_axis=1,
        symmetric_scale=SymmetricScale.FULL_RANGE,
    )
    assert isinstance(ifmr, IfmrObserver)
    assert (ifmr.bits, ifmr.asymmetric, ifmr.settings.max_percentile, ifmr.settings.min_percentile) == (
        16,
        False,
        0.9,
        0.8,
    )
    assert (ifmr.settings.search_range, ifmr.settings.search_step) == ((0.5, 1.5), 0.1)
    assert (ifmr.channel_axis, ifmr.symmetric_scale) == (1, SymmetricScale.FULL_RANGE)
    hfmg = make_observer(HfmgSettings(num_bits=8, num_of_bins=1024, asymmetric=False))
    assert isinstance(hfmg, HfmgObserver)
    assert (hfmg.bits, hfmg.settings.num_of_bins, hfmg.asymmetric) == (8, 1024, False)


def test_factors_are_those_of_the_observers():
    ended = []
    session = CalibrationSession(
        [stream("a", 2), Stream(layer="b", settings=HfmgSettings(), batch_num=2), stream("b", 2, name=HIDDEN)],
        tensors={"t": MinMaxObserver()},
        on_end=ended.append,
    )
    for seed in range(2):
        with session.batch():
            session.observe("a", data(seed))
            session.observe("b", data(seed + 10))
            session.observe("b", data(seed + 20), HIDDEN)
            session.observe_tensor("t", data(seed + 30))
    assert session.done
    assert ended == [session.result]
    result = session.result
    assert result.layers["a"]["input"].scale == factors_of(data(0), data(1)).scale
    assert result.layers["b"]["input"].scale == factors_of(data(10), data(11), settings=HfmgSettings()).scale
    assert result.layers["b"][HIDDEN].offset == factors_of(data(20), data(21)).offset
    both = torch.cat([data(30), data(31)])
    assert result.tensors["t"].scale.item() == pytest.approx((both.max() - both.min()).item() / 255)


def test_progress_is_told_after_each_batch_but_the_last():
    told = []
    session = CalibrationSession([stream("a", 2), stream("b", 3)], on_progress=told.append)
    for _ in range(3):
        with session.batch():
            session.observe("a", data(1))
            session.observe("b", data(2))
    assert told == [{"a": (1, 2), "b": (1, 3)}, {"a": (2, 2), "b": (2, 3)}]
    assert session.done


def test_missing_batches_are_told_by_layer():
    session = CalibrationSession([stream("a", 2), stream("b", 4)])
    session.observe("a", data(1))
    session.observe("a", data(2))
    session.observe("b", data(3))
    assert session.missing() == 'calibrated 1 of 2 layers; 3 more batches needed for "b"'
    with pytest.raises(CalibrationError, match='3 more batches needed for "b"'):
        _ = session.result
    for seed in range(3):
        session.observe("b", data(seed))
    assert session.missing() == ""


def test_many_waiting_layers_are_not_all_listed():
    session = CalibrationSession([stream(f"layer{number}") for number in range(8)])
    assert session.missing().endswith('"layer4" and 3 more')


def test_batches_beyond_the_number_asked_for_change_nothing():
    session = CalibrationSession([stream("a", 1), stream("b", 2)])
    with session.batch():
        session.observe("a", data(1))
        session.observe("b", data(2))
    with session.batch():
        session.observe("a", data(1) * 100)
        session.observe("b", data(3))
    before = session.result
    with session.batch():
        session.observe("a", data(1) * 100)
        session.observe("b", torch.full((3,), torch.nan))  # not even looked at
        session.observe_tensor("t", data(1))
    assert session.result is before
    assert before.layers["a"]["input"].scale == factors_of(data(1)).scale


def test_data_of_a_finished_session_is_let_go():
    session = CalibrationSession([stream("a")])
    values = data(1)
    observer = weakref.ref(session._layers["a"]["input"].observer)
    session.observe("a", values)
    gc.collect()
    assert observer() is None


def test_data_of_a_layer_that_is_called_once_is_let_go_before_the_next_layer_in_the_last_batch():
    session = CalibrationSession([stream("a", 2), stream("b", 2)], show_bar=False)
    observer = weakref.ref(session._layers["a"]["input"].observer)
    with session.batch(called_once=["a"]):
        session.observe("a", data(1))
        session.observe("b", data(2))
    assert observer() is not None
    assert session.is_observing
    with session.batch(called_once=["a"]):
        session.observe("a", data(3))
        gc.collect()
        assert observer() is None
        assert not session.is_observing  # a state of it would lack the layer
        with pytest.raises(CalibrationError, match='layer "a" is called again in a batch'):
            session.observe("a", data(4))
        session.observe("b", data(5))
        session.observe("b", data(6))
    assert session.result.layers["a"]["input"].scale == factors_of(data(1), data(3)).scale
    assert session.result.layers["b"]["input"].scale == factors_of(data(2), data(5), data(6)).scale


def test_memory_does_not_grow_with_the_number_of_batches():
    session = CalibrationSession([stream("a", OPEN_ENDED)])
    values = data(1, 1 << 19)
    for _ in range(3):
        session.observe("a", values)
    observer = session._layers["a"]["input"].observer
    for _ in range(5):
        assert len(pickle.dumps(observer)) < values.nbytes / 2  # less than half a batch, however many were seen
        session.observe("a", values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_errors_name_layer_and_batch_and_leave_the_session_usable(bad):
    session = CalibrationSession([stream("conv", 2)])
    session.observe("conv", data(1))
    with pytest.raises(CalibrationError, match=r'layer "conv", batch 2: the activation holds'):
        session.observe("conv", torch.tensor([1.0, bad]))
    assert session.progress == {"conv": (1, 2)}
    session.observe("conv", data(2))
    assert session.result.layers["conv"]["input"].scale == factors_of(data(1), data(2)).scale


def test_an_error_in_the_result_names_the_layer():
    session = CalibrationSession([stream("conv")])
    with pytest.raises(CalibrationError, match='layer "conv": the range is too large'):
        session.observe("conv", torch.tensor([0.0, 1e38]))


def test_hidden_states_are_named_in_errors():
    session = CalibrationSession([stream("rnn", name=HIDDEN)])
    with pytest.raises(CalibrationError, match=r'layer "rnn", hidden state, batch 1'):
        session.observe("rnn", torch.tensor([torch.nan]), HIDDEN)


def test_a_batch_that_fails_does_not_end_the_session():
    session = CalibrationSession([stream("a")])
    with suppress(ZeroDivisionError), session.batch():
        session.observe("a", data(1))
        _ = 1 / 0
    assert not session.done
    with session.batch():
        pass
    assert session.done


def test_a_result_that_cannot_be_written_is_written_with_the_next_batch():
    attempts = []

    def write(result):
        attempts.append(result)
        if len(attempts) == 1:
            raise OSError("disk full")

    session = CalibrationSession([stream("a")], on_end=write)
    with pytest.raises(OSError, match="disk full"):
        session.observe("a", data(1))
    assert not session.done
    with session.batch():
        pass
    assert session.done
    assert len(attempts) == 2


def test_zero_data_gets_scale_one_with_a_warning(caplog):
    session = CalibrationSession([stream("dead")])
    with caplog.at_level(logging.WARNING):
        session.observe("dead", torch.zeros(5))
    assert session.result.layers["dead"]["input"].scale == 1
    assert 'layer "dead": all values are (as good as) zero' in caplog.text


def test_scales_are_rounded_to_half_precision_when_asked():
    session = CalibrationSession([stream("a", force_fp16=True)])
    session.observe("a", data(1))
    found = session.result.layers["a"]["input"].scale
    assert found == found.half().float()
    assert found == factors_of(data(1)).scale.half().float()


def test_tensors_between_layers_never_hold_up_or_break_the_session():
    session = CalibrationSession(
        [stream("a")], tensors={name: MinMaxObserver() for name in ("seen", "unseen", "broken", "given up")}
    )
    with session.batch():
        session.observe_tensor("seen", data(1))
        session.observe_tensor("broken", torch.tensor([torch.nan]))
        session.observe_tensor("given up", data(1))
        session.give_up_tensor("given up", "no reason")
        session.observe_tensor("unknown", data(1))
        session.observe("a", data(1))
    assert list(session.result.tensors) == ["seen"]


def test_a_session_can_end_with_what_there_is():
    session = CalibrationSession([stream("a", OPEN_ENDED), stream("b", OPEN_ENDED)])
    session.observe("a", data(1))
    with pytest.raises(CalibrationError, match='no batch reaches 1 of 2 layers: "b"'):
        session.finish()
    session.observe("b", data(2))
    session.finish()
    session.finish()
    assert session.result.layers["a"]["input"].scale == factors_of(data(1)).scale


def test_wrong_names_are_refused():
    session = CalibrationSession([stream("conv1")])
    with pytest.raises(ArgumentError, match=r'"convl" is not being calibrated\. Did you mean "conv1"'):
        session.observe("convl", data(1))
    with pytest.raises(ArgumentError, match='layer "conv1" has no "hidden state" to observe; it has input'):
        session.observe("conv1", data(1), HIDDEN)
    with pytest.raises(ArgumentError, match='layer "a": "input" is to be observed twice'):
        CalibrationSession([stream("a"), stream("a")])
    with pytest.raises(CalibrationError, match="no layer to calibrate"):
        CalibrationSession([])


def test_interleaved_sessions_do_not_disturb_each_other():
    apart = []
    for seed in (1, 2):
        alone = CalibrationSession([stream("a", 2)])
        alone.observe("a", data(seed))
        alone.observe("a", data(seed + 10))
        apart.append(alone.result.layers["a"]["input"].scale)
    first, second = (CalibrationSession([stream("a", 2)]) for _ in range(2))
    with first.batch(), second.batch():
        first.observe("a", data(1))
        second.observe("a", data(2))
    second.observe("a", data(12))
    first.observe("a", data(11))
    assert [session.result.layers["a"]["input"].scale for session in (first, second)] == apart


class Terminal:
    """A standard error that looks like a terminal."""

    encoding = "utf-8"

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return True


def test_a_bar_is_shown_on_a_terminal_and_the_end_is_told(monkeypatch, caplog):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    session = CalibrationSession([stream("a", 3)])
    with caplog.at_level(logging.INFO):
        for seed in range(3):
            session.observe("a", data(seed))
    assert "Calibrating" in terminal.text
    assert "3/3" in terminal.text
    assert "calibrated 1 of 1 layer (3 batches)" in caplog.text


def test_a_session_that_is_given_up_takes_its_bar_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    session = CalibrationSession([stream("a", 3)])
    session.observe("a", data(1))
    session.close()
    shows_cursor = "\x1b[?25h"
    assert terminal.text.rstrip().endswith(shows_cursor)
    again = CalibrationSession([stream("a", 3)])
    again.observe("a", data(1))
    terminal.text = ""
    del again  # forgotten by its user
    gc.collect()
    assert shows_cursor in terminal.text


def follower(layer, leader):
    return stream(layer, 2, same_as=(leader, "input"))


def test_a_stream_takes_over_the_factors_of_one_that_sees_the_same_values():
    session = CalibrationSession([follower("concat", "conv"), stream("conv", 2)])
    for seed in (1, 2):
        session.observe("concat", torch.zeros(2, 3))
        session.observe("conv", data(seed))
        assert session.progress["concat"] == session.progress["conv"]
    found = session.result.layers
    assert found["concat"]["input"] is found["conv"]["input"]
    assert session.result.shapes == {"concat": {"input": (2, 3)}, "conv": {"input": tuple(data(1).shape)}}


def test_layers_that_have_enough_are_told_when_they_are_reached_again():
    ready, ended = [], []
    session = CalibrationSession(
        [stream("a"), stream("b"), stream("never")], on_ready=ready.append, on_end=ended.append
    )
    for _ in range(3):
        session.observe("a", data(1), ends_batch=False)
        session.observe("b", data(2), ends_batch=False)
    assert [list(result.layers) for result in ready] == [["a", "b"]]
    assert not ended
    session.observe("never", data(3), ends_batch=False)
    assert list(ended[0].layers) == ["a", "b", "never"]
    assert ended[0].layers["a"]["input"] is ready[0].layers["a"]["input"]


def test_progress_is_told_at_the_end_of_a_forward_pass():
    told = []
    session = CalibrationSession([stream("a", 2), stream("b", 2)], on_progress=told.append)
    session.observe("a", data(1), ends_batch=False)
    assert not told
    session.observe("b", data(1), ends_batch=True)
    assert told == [{"a": (1, 2), "b": (1, 2)}]


def test_a_stream_may_bring_its_own_observer():
    session = CalibrationSession([stream("a", make_observer=lambda: IfmrObserver(IfmrSettings(num_bits=4)))])
    session.observe("a", data(1))
    assert session.result.layers["a"]["input"].bits == 4
