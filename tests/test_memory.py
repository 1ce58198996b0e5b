"""Python's collector of cycles, stopped for a while; large blocks with pages of their own, for a while."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from amct.memory import uncollected


class Node:
    """An object that can be part of a cycle."""


def cycle():
    """A reference to an object that only a cycle keeps alive."""
    node = Node()
    node.itself = node
    return weakref.ref(node)


def test_the_collector_rests_and_goes_on():
    assert gc.isenabled()
    with uncollected(), uncollected():
        assert not gc.isenabled()
        lost = cycle()
    assert gc.isenabled()
    gc.collect()
    assert lost() is None  # what was made in between is not kept forever


def test_it_goes_on_after_an_error():
    with pytest.raises(ValueError, match="broken"), uncollected():
        raise ValueError("broken")
    assert gc.isenabled()


def test_a_collector_that_the_user_switched_off_stays_off():
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_the_user_froze_stays_frozen():
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with uncollected():
            pass
        assert before
        assert gc.get_freeze_count() == before
    finally:
        gc.unfreeze()


def test_the_last_of_several_threads_restarts_it():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with uncollected():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with uncollected():
        thread.start()
        assert inside.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join(10)
    assert gc.isenabled()
