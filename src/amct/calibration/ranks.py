"""The processes that calibrate together under ``torch.distributed``: who they are, and how they meet once at the end.

Rank r of N runs batches r, r + N, r + 2N, … of all. When a rank has run its share it enters the meeting: what the ranks
have observed is passed along a tree to rank 0, rank 0 computes and writes, and every rank gets the result.

Nobody waits forever. Every rank tells the others through the store of the process group how far it is. A rank that says
nothing for a while (it died, or never began) is named in the error that ends all others, and so is one that failed.
Tensors are exchanged only between ranks that are known to be in the meeting, on the CPU: with gloo, whatever the
backend of the process group is.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, distributed

from amct.errors import AmctError, ArgumentError, CalibrationError
from amct.log import LOCAL_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

Arrays = dict[str, "NDArray[Any]"]

LOCAL = LOCAL_VARIABLE
"""Environment variable: "1" makes every process calibrate by itself, with all its batches."""
TIMEOUT = "AMCT_RANK_TIMEOUT"
"""Environment variable: after so many seconds without a sign of life a rank counts as lost."""

_DEFAULT_TIMEOUT = 40.0
_BEAT = 1.0  # seconds between two signs of life
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1
_TAG = 7_141
_CALIBRATING, _READY, _GO, _DONE, _FAILED = "calibrating", "ready", "go", "done", "failed"


@dataclass(frozen=True)
class Ranks:
    """The processes that calibrate together, and which of them this one is.

    Attributes:
        rank: The number of this process.
        size: How many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes files, and shows what it does."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return self.size == 1

    def share(self, batches: int) -> int:
        """How many of so many batches this rank runs."""
        return len(range(self.rank, batches, self.size))

    def number(self, own: int) -> int:
        """The number, among all batches, of the batch that this rank runs as its ``own``-th."""
        return self.rank + own * self.size

    def need_a_batch_each(self, batches: int) -> None:
        """Refuse a calibration in which some rank would run no batch and therefore never enter the meeting.

        Raises:
            CalibrationError: There are fewer batches than ranks.
        """
        if batches < self.size:
            raise CalibrationError(
                f"batch_num is {batches}, but {self.size} processes calibrate together (torch.distributed), and "
                f"batch_num counts the batches of all of them; set it to at least {self.size}, or set the environment "
                f"variable {LOCAL}=1 to calibrate in every process by itself"
            )

    def meet(self, what: str) -> None:
        """Wait for the other processes, so that they find what the first one has written.

        Raises:
            CalibrationError: One of them failed or does not come.
        """
        if not self.is_alone:
            meeting = Meeting(self, fingerprint([what]))
            with meeting.together():
                meeting.enter()


ALONE = Ranks()


def all_ranks() -> Ranks:
    """The processes of ``torch.distributed``; this one alone if that is not initialized, or if the switch is set.

    Raises:
        ArgumentError: The environment variable has another value than 0 or 1.
    """
    local = os.environ.get(LOCAL, "0")
    if local not in ("", "0", "1"):
        raise ArgumentError(f'environment variable {LOCAL}: expected "0" or "1", got "{local}"')
    if local == "1" or not distributed.is_available() or not distributed.is_initialized():
        return ALONE
    return Ranks(distributed.get_rank(), distributed.get_world_size())


@contextmanager
def joined_by_torchrun() -> Iterator[Ranks]:
    """Initialize ``torch.distributed`` from the environment variables of torchrun, for the duration of the context."""
    distributed.init_process_group("gloo")
    try:
        yield Ranks(distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()


def fingerprint(parts: Iterable[object]) -> str:
    """The fingerprint of texts, bytes, arrays and tensors in their order; of anything else its type alone counts."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, (Tensor, np.ndarray)):
            digest.update(repr((tuple(part.shape), str(part.dtype))).encode())
            digest.update(_content(part))
            continue
        content = part if isinstance(part, bytes) else str(part if isinstance(part, str) else type(part)).encode()
        digest.update(b"%d:" % len(content) + content)
    return digest.hexdigest()


def _content(values: Tensor | np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> memoryview:
    if isinstance(values, Tensor):
        flat = values.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().data  # every type, also those that NumPy does not have
    if values.dtype.hasobject:  # texts
        return memoryview(repr(values.tolist()).encode())
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


@dataclass(frozen=True)
class Activity:
    """What processes do together, in the words of the message that one of them is lost.

    Attributes:
        noun: What it is called.
        verb: The same as a verb.
        mismatch: What a process may be doing instead that has not begun this.
        requirement: What every process has to do.
    """

    noun: str = "calibration"
    verb: str = "calibrate"
    mismatch: str = "calibrates another model or config"
    requirement: str = (
        "Every process must run its share of the batches: with torch.distributed, batch_num counts the batches of all "
        "of them"
    )


class OtherRankError(CalibrationError):
    """Another rank failed or was lost, so this one cannot go on."""


class Meeting:
    """One meeting of all ranks; each rank creates it before its first batch.

    Args:
        ranks: The processes.
        what: What they calibrate; ranks meet if they say the same. The n-th meeting about it is the same in each rank.
        activity: How messages call it.
    """

    def __init__(self, ranks: Ranks, what: str, activity: Activity = Activity()) -> None:  # noqa: B008  it is frozen
        self._ranks, self._activity = ranks, activity
        self._timeout = _timeout()
        self._store = distributed.distributed_c10d._get_default_store()
        self._others = list(range(1, ranks.size)) if ranks.is_first else [0]
        self._signs: dict[int, tuple[str, float]] = {}
        self._beats = 0
        self._last_beat = self._last_look = 0.0
        self._has_failed = False
        self._stage, self._text, self._counts = _CALIBRATING, "no batch yet", [0]
        number = self._reach(lambda: self._store.add(f"amct/{what}/{ranks.rank}", 1))
        self._name = f"amct/{what}/{number}"
        self._tell()

    def beat(self, text: str) -> None:
        """Tell the other ranks, at most once a second, how far this one is; also look whether they are well.

        Raises:
            CalibrationError: Another rank failed, or says nothing any more; the message names it.
        """
        self._text = text
        if time.monotonic() - self._last_beat >= _BEAT:
            self._tell()
            self._look()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Enclose work of this rank: if it fails, the other ranks fail too."""
        try:
            yield
        except BaseException as error:
            self._fail(str(error) if isinstance(error, AmctError) else f"{type(error).__name__}: {error}")
            raise

    def enter(self, counts: Sequence[int] = ()) -> list[int]:
        """Wait until every rank has entered; returns the sums of their ``counts``.

        Raises:
            CalibrationError: Another rank failed, never entered or died; the message names it.
        """
        self._counts = list(counts)
        self._stage, self._text = _READY, "has run its share"
        self._tell()
        found = self._wait((_READY,) if self._ranks.is_first else (_GO, _DONE))
        if self._ranks.is_first:
            self._counts = [sum(each) for each in zip(self._counts, *(found[rank] for rank in found), strict=True)]
            self._stage, self._text = _GO, "computes the factors"
            self._tell()
            return self._counts
        return found[0]

    def collect(self, give: Callable[[], Arrays], take: Callable[[Arrays], None]) -> None:
        """Pass what the ranks have to rank 0: each rank takes from those behind it in the tree, then gives its own."""
        rank, size = self._ranks.rank, self._ranks.size
        step = 1
        while step < size:
            if rank & step:
                self._send(give(), rank - step)
                return
            if rank + step < size:
                take(self._receive(rank + step))
                self._tell()
            step *= 2

    def publish(self, arrays: Arrays) -> None:
        """Rank 0: give the result to all ranks."""
        self._stage = _DONE
        self._tell()
        self._pass_on(arrays)

    def receive(self) -> Arrays:
        """Other ranks: wait for the result of rank 0, and pass it on.

        Raises:
            CalibrationError: Rank 0 failed or died.
        """
        self._wait((_DONE,))
        rank = self._ranks.rank
        arrays = self._receive(rank - (rank & -rank))
        self._pass_on(arrays)
        return arrays

    def exchange(self, own: Arrays) -> list[Arrays]:
        """The arrays of every rank, in every rank."""
        with self.together():
            self.enter()
            found = {self._ranks.rank: own}
            self.collect(lambda: _flat(found), lambda arrays: found.update(_by_rank(arrays)))
            if self._ranks.is_first:
                self.publish(_flat(found))
            else:
                found = _by_rank(self.receive())
        return [found[rank] for rank in range(self._ranks.size)]

    # -- the tree ------------------------------------------------------------------------------------------------------

    def _pass_on(self, arrays: Arrays) -> None:
        rank, size = self._ranks.rank, self._ranks.size
        step = 1 << (size - 1).bit_length() if rank == 0 else rank & -rank
        while step > 1:
            step //= 2
            if rank + step < size:
                self._send(arrays, rank + step)

    def _send(self, arrays: Arrays, rank: int) -> None:
        content = torch.frombuffer(bytearray(pack(arrays)), dtype=torch.uint8)
        with self._exchange_with(rank):
            for tensor in (torch.tensor([content.numel()]), content):
                work = distributed.isend(tensor, rank, group=_cpu_group(), tag=_TAG)
                assert work is not None, "this process belongs to the group"
                work.wait(timedelta(seconds=self._timeout))

    def _receive(self, rank: int) -> Arrays:
        size = torch.zeros(1, dtype=torch.int64)
        with self._exchange_with(rank):
            self._receive_tensor(size, rank)
            content = torch.empty(int(size), dtype=torch.uint8)
            self._receive_tensor(content, rank)
        return unpack(content.numpy().tobytes())

    def _receive_tensor(self, tensor: torch.Tensor, rank: int) -> None:
        work = distributed.irecv(tensor, rank, group=_cpu_group(), tag=_TAG)
        assert work is not None, "this process belongs to the group"
        work.wait(timedelta(seconds=self._timeout))

    @contextmanager
    def _exchange_with(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._look()  # whoever failed first says why
            raise self._lost([rank], f"the connection to it broke: {error}") from error

    # -- signs of life -------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        self._beats += 1
        self._last_beat = time.monotonic()
        status = {"stage": self._stage, "beat": self._beats, "text": self._text, "counts": self._counts}
        self._reach(lambda: self._store.set(f"{self._name}/{self._ranks.rank}", json.dumps(status)))

    def _fail(self, text: str, lost: Sequence[int] = ()) -> None:
        """Tell the other ranks why this one ends; the first one waits until they have read it: it may keep the store.

        A rank that is sending to another one reads it only when that has timed out.
        """
        if self._has_failed:
            return
        self._has_failed = True
        self._stage, self._text = _FAILED, text
        with suppress(OtherRankError):  # the error of this rank is the one to show
            self._tell()
            deadline = time.monotonic() + self._timeout + _BEAT
            waiting = [rank for rank in self._others if rank not in lost] if self._ranks.is_first else []
            while waiting and time.monotonic() < deadline:
                found = {rank: self._read(rank) for rank in waiting}
                waiting = [rank for rank, status in found.items() if status is not None and status["stage"] != _FAILED]
                time.sleep(_LONGEST_PAUSE)

    def _read(self, rank: int) -> dict[str, Any] | None:
        key = f"{self._name}/{rank}"
        if not self._reach(lambda: self._store.check([key])):
            return None
        status: dict[str, Any] = json.loads(self._reach(lambda: self._store.get(key)))
        return status

    def _reach(self, use: Callable[[], Any]) -> Any:  # noqa: ANN401  whatever the store returns
        try:
            return use()
        except RuntimeError as error:
            self._has_failed = True
            raise OtherRankError(
                f"{self._me}: the store of the process group cannot be reached; rank 0, which keeps it unless torchrun "
                f"does, has most likely died ({error})"
            ) from error

    def _look(self) -> dict[int, dict[str, Any]]:
        """Read the status of the other ranks.

        Raises:
            OtherRankError: One has failed, or has been silent for too long.
        """
        now = time.monotonic()
        if now - self._last_look > self._timeout / 2:
            self._signs.clear()  # this process was busy itself, or is on a busy machine: silence is measured anew
        self._last_look = now
        found: dict[int, dict[str, Any]] = {}
        silent: list[int] = []
        for rank in self._others:
            status = self._read(rank)
            if status is not None:
                found[rank] = status
            if status is not None and status["stage"] == _FAILED:
                self._end_with(
                    status["text"] if status["text"].startswith("rank ") else f"rank {rank}: {status['text']}"
                )
            sign = f"{status['stage']} {status['beat']}" if status is not None else ""
            if self._signs.get(rank, ("", 0.0))[0] != sign or rank not in self._signs:
                self._signs[rank] = (sign, now)
            elif now - self._signs[rank][1] > self._timeout and (status is None or status["stage"] != _DONE):
                silent.append(rank)
        if silent:
            words = (f"rank {rank} {_last_status(found.get(rank), self._activity)}" for rank in silent)
            raise self._lost(silent, "; ".join(words))
        return found

    def _wait(self, stages: Sequence[str]) -> dict[int, list[int]]:
        """Wait until the others are at one of these stages; returns their counts."""
        begin = time.monotonic()
        self._signs.clear()
        while True:
            found = self._look()
            if len(found) == len(self._others) and all(status["stage"] in stages for status in found.values()):
                return {rank: status["counts"] for rank, status in found.items()}
            if time.monotonic() - self._last_beat >= _BEAT:
                self._tell()
            waited = time.monotonic() - begin
            time.sleep(min(max(waited / 10, _SHORTEST_PAUSE), _LONGEST_PAUSE))  # at most a tenth too long

    @property
    def _me(self) -> str:
        return f"rank {self._ranks.rank} of {self._ranks.size}"

    def _lost(self, lost: Sequence[int], how: str) -> OtherRankError:
        names, activity = ", ".join(map(str, lost)), self._activity
        text = (
            f"rank {names} of {self._ranks.size} is lost to the {activity.noun} ({how}). {activity.requirement}. To "
            f"{activity.verb} in one process by itself, set {LOCAL}=1; if a batch may take longer than "
            f"{self._timeout:g} s, set {TIMEOUT}"
        )
        self._fail(text, lost)
        return OtherRankError(text)

    def _end_with(self, text: str) -> None:
        self._fail(text)
        raise OtherRankError(text)


def _last_status(status: Mapping[str, Any] | None, activity: Activity) -> str:
    if status is None:
        return f"has not begun this {activity.noun}, or {activity.mismatch}"
    return f"has given no sign of life since: {status['text']}"


def _timeout() -> float:
    text = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(text) if text else _DEFAULT_TIMEOUT
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise ArgumentError(f'environment variable {TIMEOUT}: expected a number of seconds, got "{text}"')
    return seconds


def _cpu_group() -> distributed.ProcessGroup | None:
    """The group for tensors on the CPU; None: the default group can send them."""
    if "cpu:gloo" in str(distributed.get_backend_config()):
        return None
    raise CalibrationError(
        "calibration in several processes sends arrays of the CPU, which the backend "
        f'"{distributed.get_backend()}" cannot; use init_process_group("cpu:gloo,cuda:nccl")'
    )


def joined(parts: Mapping[str, Mapping[str, NDArray[Any]]]) -> Arrays:
    """The arrays of all parts, each with its part and a slash before its name."""
    return {f"{part}/{name}": array for part, arrays in parts.items() for name, array in arrays.items()}


def part_of(arrays: Mapping[str, NDArray[Any]], part: str) -> Arrays:
    """The arrays of one part that was joined with others, by their own names."""
    prefix = f"{part}/"
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _flat(found: Mapping[int, Arrays]) -> Arrays:
    parts = joined({str(rank): arrays for rank, arrays in found.items()})
    return {**parts, "ranks": np.array(sorted(found), np.int64)}


def _by_rank(arrays: Arrays) -> dict[int, Arrays]:
    return {int(rank): part_of(arrays, str(rank)) for rank in arrays["ranks"]}


def pack(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays of numbers as bytes: names, types and shapes in JSON, then all values."""
    found = [(name, np.ascontiguousarray(array)) for name, array in arrays.items()]
    head = json.dumps([(name, array.dtype.str, arrays[name].shape) for name, array in found]).encode()
    return b"".join([struct.pack("<q", len(head)), head, *(array.tobytes() for _, array in found)])


def unpack(content: bytes) -> Arrays:
    """The arrays that were packed; nothing in them is executed."""
    (size,) = struct.unpack_from("<q", content)
    place = struct.calcsize("<q") + size
    arrays: Arrays = {}
    for name, kind, shape in json.loads(content[place - size : place]):
        array = np.empty(shape, np.dtype(kind))
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(content, np.uint8)[place : place + array.nbytes]
        arrays[name] = array
        place += array.nbytes
    return arrays
