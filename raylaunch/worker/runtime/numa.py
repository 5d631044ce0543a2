"""`--numa-binding`: bind a worker to the CPUs near its GPU, which torch chooses."""

from __future__ import annotations

import contextlib
import os
import traceback
import zlib
from collections.abc import Mapping
from pathlib import Path

from raylaunch.core.placement.devices import VARIABLES
from raylaunch.worker import torch_internals
from raylaunch.worker.runtime.files_wait import FOLDER_VARIABLE
from raylaunch.worker.runtime.spec import WorkerSpec

_MAX_ANSWER_BYTES = 4000
"""Less than a pipe takes, so that the child never waits for its reader."""


class CannotBindError(Exception):
    """The binding that the job asks for is not possible. torchrun ends the job there too."""


def bind(spec: WorkerSpec) -> None:
    """Bind this process, and all processes that it will start, if the job asks for it. Raises CannotBindError."""
    if spec.numa_binding is None:
        return
    memory = _memory(spec)
    with contextlib.suppress(OSError, ValueError):
        os.sched_setaffinity(0, map(int, memory.read_text().split()))
        return
    cpus, why_not = _query_in_child(spec.numa_binding, spec.gpus.start, spec.node_devices)
    if not cpus:
        msg = f"cannot bind local rank {spec.local_rank} to the CPUs near its GPU: {why_not or 'there are none'}"
        raise CannotBindError(msg)
    with contextlib.suppress(OSError):
        memory.write_text(" ".join(map(str, sorted(cpus))))
    os.sched_setaffinity(0, cpus)


def _memory(spec: WorkerSpec) -> Path:
    """Return the file that has the CPUs, once a worker with this GPU has asked for them.

    It is beside RAYLAUNCH_FAST_DIR, and so goes with the agent.
    """
    key = spec.numa_binding, spec.gpus.start, sorted(spec.node_devices.items()), sorted(os.sched_getaffinity(0))
    return Path(spec.env.get(FOLDER_VARIABLE, "")).parent / f"cpus-{zlib.crc32(repr(key).encode()):08x}"


def _query_in_child(mode: str, gpu: int, devices: Mapping[str, str]) -> tuple[set[int], str]:
    """Return the CPUs, or why there are none.

    A child process asks torch, because that initializes CUDA, which must be left to the script, and takes seconds on a
    node with several GPUs. It sees all GPUs of the node, as torchrun does: the workers near the same CPUs divide them.
    """
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for name in VARIABLES:
                os.environ.pop(name, None)
            os.environ.update(devices)
            answer = " ".join(map(str, sorted(torch_internals.cpus_near_gpu(mode, gpu))))
        except BaseException as error:  # noqa: BLE001
            answer = "!" + traceback.format_exception_only(error)[-1].strip()
        os.write(writable, answer.encode(errors="backslashreplace")[:_MAX_ANSWER_BYTES])
        os._exit(0)
    os.close(writable)
    with open(readable, encoding="utf-8", errors="replace") as file:
        answer = file.read()
    os.waitpid(child, 0)
    if answer.startswith("!"):
        return set(), answer[1:]
    return {int(cpu) for cpu in answer.split()}, ""
