"""Pinning of a buffer, with a stand-in for CUDA; with a GPU, tests/gpu has the rest."""

from __future__ import annotations

import contextlib
import os
import sys
from types import SimpleNamespace

import pytest

from raylaunch.worker.state import device_copies
from raylaunch.worker.state.commit_buffer import HEADER_BYTES, CommitBuffer


@pytest.fixture
def cuda(monkeypatch):
    """A torch whose `cudaHostRegister` answers 801 (not supported); the kernel after that raises this, once."""
    calls = []

    @contextlib.contextmanager
    def current(device):
        calls.append(("current", device.index))
        yield
        calls.append(("current", 0))

    def register(address, size, flags):
        calls.append(("register", address, size, flags))
        return answer[0]

    def kernel(*_, device):
        calls.append(("kernel", device.index))
        raise RuntimeError("CUDA error: operation not supported")

    answer = [801]
    memory = SimpleNamespace(data_ptr=lambda: 4096)
    found = SimpleNamespace(
        uint8=None,
        frombuffer=lambda *_, dtype: memory,
        zeros=kernel,
        cuda=SimpleNamespace(cudart=lambda: SimpleNamespace(cudaHostRegister=register), device=current),
    )
    monkeypatch.setitem(sys.modules, "torch", found)
    monkeypatch.setattr(device_copies, "_pinned", set())
    return SimpleNamespace(calls=calls, answer=answer)


def device(index):
    return SimpleNamespace(type="cuda", index=index)


@pytest.fixture
def buffer():
    fd = os.memfd_create("test")
    os.ftruncate(fd, 2 * HEADER_BYTES)
    return CommitBuffer(fd)


def test_a_failure_is_not_left_for_the_script(cuda, buffer):
    """The error that CUDA remembers is raised here, not at the script's next kernel; and nobody tries again.

    All of it is done on the device of the tensors, which may not be the current one: no other gets a context.
    """
    device_copies.pin(buffer, device(1))
    device_copies.pin(buffer, device(1))
    assert cuda.calls == [("current", 1), ("register", 4096, buffer.size, 0), ("kernel", 1), ("current", 0)]


def test_pinned_once(cuda, buffer):
    """Where it works no kernel is needed."""
    cuda.answer[0] = 0
    device_copies.pin(buffer, device(0))
    device_copies.pin(buffer, device(0))
    assert cuda.calls == [("current", 0), ("register", 4096, buffer.size, 0), ("current", 0)]
