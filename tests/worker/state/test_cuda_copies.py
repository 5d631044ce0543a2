"""Pinning of a buffer, with a stand-in for CUDA; with a GPU, tests/gpu has the rest."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from raylaunch.worker.state import cuda_copies
from raylaunch.worker.state.commit_buffer import HEADER_BYTES, CommitBuffer


@pytest.fixture
def cuda(monkeypatch):
    """A torch whose `cudaHostRegister` answers 801 (not supported); the kernel after that raises this, once."""
    calls = []

    def register(address, size, flags):
        calls.append(("register", address, size, flags))
        return answer[0]

    def kernel(*_, device):
        calls.append(("kernel", device))
        raise RuntimeError("CUDA error: operation not supported")

    answer = [801]
    memory = SimpleNamespace(data_ptr=lambda: 4096)
    found = SimpleNamespace(
        uint8=None,
        frombuffer=lambda *_, dtype: memory,
        zeros=kernel,
        cuda=SimpleNamespace(cudart=lambda: SimpleNamespace(cudaHostRegister=register)),
    )
    monkeypatch.setitem(sys.modules, "torch", found)
    monkeypatch.setattr(cuda_copies, "_pinned", set())
    return SimpleNamespace(calls=calls, answer=answer)


@pytest.fixture
def buffer():
    fd = os.memfd_create("test")
    os.ftruncate(fd, 2 * HEADER_BYTES)
    return CommitBuffer(fd)


def test_a_failure_is_not_left_for_the_script(cuda, buffer):
    """The error that CUDA remembers is raised here, not at the script's next kernel; and nobody tries again."""
    cuda_copies.pin(buffer, "cuda:1")
    cuda_copies.pin(buffer, "cuda:1")
    assert cuda.calls == [("register", 4096, buffer.size, 0), ("kernel", "cuda:1")]


def test_pinned_once(cuda, buffer):
    """Where it works no kernel is needed."""
    cuda.answer[0] = 0
    cuda_copies.pin(buffer, "cuda:0")
    cuda_copies.pin(buffer, "cuda:0")
    assert cuda.calls == [("register", 4096, buffer.size, 0)]
