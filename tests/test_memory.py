"""Python's collector of cycles, stopped for a while; large blocks with pages of their own, for a while."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import ExitStack

import pytest

from amct import memory
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


def _settings_of(monkeypatch, environment, *sizes):
    """What mallopt is called with while models of some sizes are at work, one inside the other."""
    calls = []
    for name in ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for name in environment:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(memory, "_of_glibc", lambda _: lambda *arguments: calls.append(arguments))
    with ExitStack() as stack:
        for size in sizes:
            stack.enter_context(memory.own_pages(size))
        inside = list(calls)
    return inside, calls[len(inside) :]


@pytest.mark.parametrize("count", [1, 2])
def test_blocks_of_large_models_get_pages_of_their_own_for_a_while(monkeypatch, count):
    inside, after = _settings_of(monkeypatch, (), *[memory.LARGE_MODEL] * count)
    assert dict(inside) == {-3: 2**20, -1: 2**26}
    assert dict(after) == {-3: 2**25, -1: 2**26}  # where glibc itself ends


def test_large_tensors_get_pages_of_their_own_beside_a_large_model(monkeypatch):
    calls = []
    for name in ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(memory, "_of_glibc", lambda _: lambda *arguments: calls.append(arguments))
    with memory.own_pages_of_large_tensors(), memory.own_pages(memory.LARGE_MODEL):
        pass
    assert [size for setting, size in calls if setting == -3] == [2**23, 2**20, 2**23, 2**25]


def test_small_models_and_users_choices_leave_the_heap_alone(monkeypatch):
    assert _settings_of(monkeypatch, (), memory.LARGE_MODEL - 1) == ([], [])
    assert _settings_of(monkeypatch, ("MALLOC_MMAP_THRESHOLD_",), memory.LARGE_MODEL) == ([], [])
    assert _settings_of(monkeypatch, ("GLIBC_TUNABLES",), memory.LARGE_MODEL) == ([], [])
