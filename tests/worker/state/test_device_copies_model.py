"""Commits of tensors on a device, in any order in which streams may run: a sealed one is what was committed.

The host, the script's stream and the stream of copies go on as hypothesis says. At any moment NCCL may be aborted, after
which kernels compute with garbage, or the process killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from itertools import chain, count
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from raylaunch.core.machine.commits import Commit, HeldCommit  # noqa: E402
from raylaunch.worker.state import device_copies  # noqa: E402
from raylaunch.worker.state.buffer_client import BufferClient, Request  # noqa: E402
from raylaunch.worker.state.commit_agreement import CopyRounds  # noqa: E402
from raylaunch.worker.state.commit_buffer import HEADER_BYTES, CommitBuffer, page_aligned  # noqa: E402
from raylaunch.worker.state.rank_buffers import RankBuffers  # noqa: E402
from raylaunch.worker.state.shared_tensors import PartMemory  # noqa: E402
from raylaunch.worker.state.snapshots.snapshot import Snapshot  # noqa: E402
from tests import fake_nccl  # noqa: E402
from tests.profiles import examples  # noqa: E402

STEPS = 5
TURNS, MOST_TURNS, NEVER = 60, 1000, 10**6


class KilledError(Exception):
    """The process is killed here."""


class OrderedError(Exception):
    """Another attempt begins: what `leave_if_ordered` raises."""


class Rank:
    """A rank that commits after each step, and seals a commit when the next one is due, as `State` does."""

    def __init__(self, turns: Iterator[int], *, abort_at: int, kill_at: int) -> None:
        """`turns`: which stream goes on. It aborts and is killed after so many of them."""
        self._turns, self._abort_at, self._kill_at = turns, abort_at, kill_at
        self._turn = 0
        self.is_ordered = self.is_aborted = False
        self.device = fake_nccl.device_
        self.device.streams[1:] = []
        self.device.streams[0].kernels.clear()
        self.device.choose = self._choose
        self.files: list[int] = []
        copies = CopyRounds(None, 0, 1)
        self.buffers = RankBuffers(BufferClient(1, 0, ask=self._ask), 0, range(1), spared=None, copies=copies)
        self.weights = fake_nccl.on_device(torch.zeros(3))

    def _ask(self, request: Request) -> tuple[int | None, str]:
        if not request.bytes:
            return None, ""
        self.files.append(os.memfd_create("test"))
        os.ftruncate(self.files[-1], page_aligned(request.bytes))
        return os.dup(self.files[-1]), ""

    def _choose(self, streams: list[fake_nccl.Stream]) -> fake_nccl.Stream:
        self._turn += 1
        if self._turn >= min(self._kill_at, MOST_TURNS):
            raise KilledError
        if self._turn >= self._abort_at:
            self.is_ordered = True  # before the abort, as the survivor's thread has it
        if self._turn > self._abort_at:
            self.is_aborted = True
        return streams[next(self._turns) % len(streams)]

    def _go_on(self) -> None:
        """Let the device go on for some time, while the host does something else."""
        for _ in range(next(self._turns) % 4):
            if streams := [stream for stream in self.device.streams if stream.kernels]:
                self._choose(streams).step()

    def _reduce(self, gradient: Any, step: int) -> object:
        """Do what a kernel of NCCL does, of which the last one waits for a rank that is gone."""
        if step == STEPS - 1 and not self.is_aborted:
            return False
        return gradient.fill_(fake_nccl.GARBAGE if self.is_aborted else step)

    def train(self) -> None:
        unsealed = None
        for step in range(1, STEPS):
            gradient = torch.zeros(3)
            for kernel in (partial(self._reduce, gradient, step), partial(self.weights.add_, gradient)):
                self._go_on()
                fake_nccl.launch(kernel)
            if unsealed is not None:
                self._seal(*unsealed)
            found = Snapshot({"weights": self.weights}, ["weights"])
            self._go_on()
            unsealed = step, found, self.buffers.write(found, to_disk=False)
        self._seal(*unsealed)

    def _seal(self, step: int, found: Snapshot, copies: device_copies.DeviceCopies) -> None:
        copies.finish()
        self.check()
        held = HeldCommit(rank=0, world_size=1, commit=Commit(1, step))
        self.buffers.seal(held, found, 0, 1)

    def check(self) -> None:
        if self.is_ordered:
            raise OrderedError

    def sealed(self) -> dict[int, list[float]]:
        """Return what each sealed commit has, by its step."""
        found = {}
        for file in self.files:
            buffer = CommitBuffer(file)
            if (held := buffer.header.held()) is not None:
                found[held.commit.steps] = PartMemory(buffer).own[HEADER_BYTES:][:12].view(torch.float32).tolist()
        self.files.clear()
        return found


def train(turns: list[int], abort_at: int, kill_at: int) -> None:
    rank = Rank(chain(turns, count()), abort_at=abort_at, kill_at=kill_at)
    try:
        rank.train()
    except (KilledError, OrderedError):
        pass
    finally:
        sealed = rank.sealed()
    for step, values in sealed.items():
        assert values == [sum(range(1, step + 1))] * 3, (step, sealed)
    if min(abort_at, kill_at) == NEVER:
        assert sealed.keys() == {STEPS - 2}


ORDERS = given(
    turns=st.lists(st.integers(0, 11), max_size=2 * TURNS),
    abort_at=st.integers(1, TURNS) | st.just(NEVER),
    kill_at=st.just(NEVER) | st.integers(1, TURNS),
)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams of `fake_nccl`, whose kernels run when this test lets them."""
    for name, value in fake_nccl.CUDA.items():
        monkeypatch.setattr(torch.cpu, name, value, raising=False)
    for name, value in fake_nccl.TENSOR.items():
        monkeypatch.setattr(torch.Tensor, name, value)


def check(monkeypatch: pytest.MonkeyPatch, cases: settings) -> None:
    @cases
    @ORDERS
    def property_(turns: list[int], abort_at: int, kill_at: int) -> None:
        monkeypatch.setattr(device_copies, "_streams", {})
        train(turns, abort_at, kill_at)

    property_()


def test_a_sealed_commit_is_what_was_committed(monkeypatch):
    check(monkeypatch, examples(100))


WAITS = {
    "the copies for the script's stream": (fake_nccl.Stream, "wait_stream"),
    "the script's stream for the copies": (fake_nccl.Stream, "wait_event"),
    "the host for the copies": (device_copies.DeviceCopies, "finish"),
    "no abort before the seal": (Rank, "check"),
}


@pytest.mark.parametrize("wait", WAITS)
def test_each_wait_is_needed(monkeypatch, wait):
    """No smaller case is looked for than the first that fails."""
    monkeypatch.setattr(*WAITS[wait], lambda *_: 0.0)
    with pytest.raises(AssertionError):
        check(monkeypatch, settings(max_examples=300, phases=[Phase.generate]))
