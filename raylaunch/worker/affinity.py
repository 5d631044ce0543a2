"""`--numa-binding`: a worker runs on the CPUs near its GPU only. Which those are is torch's to say."""

from __future__ import annotations

import os
import traceback

from raylaunch.worker.spec import WorkerSpec


class CannotBindError(Exception):
    """The binding that was asked for is not to be had; torchrun ends the job there too."""


def bind(spec: WorkerSpec) -> None:
    """Bind this process, and all it will start, if the job asks for it."""
    if spec.numa_binding is None:
        return
    cpus, why = _asked_in_a_child(spec.numa_binding, spec.local_rank)
    if not cpus:
        msg = f"cannot bind local rank {spec.local_rank} to the CPUs near its GPU: {why or 'there are none'}"
        raise CannotBindError(msg)
    os.sched_setaffinity(0, cpus)


def _asked_in_a_child(mode: str, gpu: int) -> tuple[set[int], str]:
    """The CPUs, or why not. In a child, since asking initializes CUDA, which is the script's to do."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = " ".join(map(str, sorted(_near_gpu(mode, gpu))))
        except BaseException as error:  # noqa: BLE001
            answer = "!" + traceback.format_exception_only(error)[-1].strip()
        os.write(writable, answer.encode()[:4000])
        os._exit(0)
    os.close(writable)
    with open(readable, encoding="utf-8", errors="replace") as file:
        answer = file.read()
    os.waitpid(child, 0)
    if answer.startswith("!"):
        return set(), answer[1:]
    return {int(cpu) for cpu in answer.split()}, ""


def _near_gpu(mode: str, gpu: int) -> set[int]:
    """What torch 2.13's `numa/binding.py` finds; private there, and the only place that knows."""
    from torch.numa import binding  # noqa: PLC0415

    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    found: set[int] = binding._get_logical_cpus_to_bind_to(gpu_index=gpu, numa_options=options)  # noqa: SLF001
    return found
