"""Hints for a person: what to do about a failure whose message or evidence points at one reason."""

from __future__ import annotations

import re

from raylaunch.core.failures.failure import NO_FIRST_STEP, Failure
from raylaunch.core.failures.stack_notes import (
    AFTER_END,
    CHILD_STOPPED,
    FILE_CLOSED,
    IN_THE_KERNEL,
    NO_ANSWER,
    RUNNING_ON,
    STOPPED,
)
from raylaunch.core.failures.stacks import StackGroup

PATTERNS = {
    r"(?:CUDA|HIP) out of memory": (
        "the memory of the GPU ran out: a smaller batch, gradient checkpointing, or, if much is reserved but "
        "unallocated, `PYTORCH_ALLOC_CONF=expandable_segments:True`"
    ),
    r"address already in use|EADDRINUSE": (
        "the script opens a port that is in use on {host}: instead of a fixed number use MASTER_ADDR and "
        "MASTER_PORT of the environment, or port 0"
    ),
    r"No module named '?([\w.]+)": "is `{0}` installed in the Python of {host}? Every node needs it",
    r"DataLoader worker \([^\n()]*\) is killed by signal: Killed": (
        "a process that loads data was killed: set fewer `num_workers` if memory is short; `dmesg` on {host} tells"
    ),
    r"CUDA error: invalid device ordinal": (
        "there are more workers than GPUs on {host}: `nproc_per_node` is the number of workers of a node"
    ),
    r"CUDA error: (?:an illegal memory access|a misaligned address|device-side assert)": (
        "kernels run later than they are called, so the traceback may name another line; with "
        "`CUDA_LAUNCH_BLOCKING: 1` in `env` it names the call"
    ),
    r"Duplicate GPU detected": (
        "two ranks use one GPU: the script must choose its own, `torch.cuda.set_device(int(os.environ['LOCAL_RANK']))`"
    ),
    r"Too many open files in system": "allow more open files on {host}: `sysctl fs.file-max`",
    r"Too many open files(?! in system)": (
        "allow more open files on {host}, where Ray or the container is started: `ulimit -n`, `--ulimit nofile` of "
        "docker, `LimitNOFILE` of systemd"
    ),
    r"can't start new thread|pids\.max|RLIMIT_NPROC|kernel\.(?:pid_max|threads-max)": (
        "allow more processes and threads on {host}, or start fewer: `ulimit -u`, `--pids-limit` of docker, "
        "`podPidsLimit` of the kubelet, `TasksMax` of systemd"
    ),
    r"Cannot allocate memory": (
        "memory is short on {host}: fewer workers or DataLoader workers, or a higher limit of the container"
    ),
    r"\bBdbQuit\b|EOF when reading a line": (
        "a worker has no terminal to read from: `--debug RANK` gives one rank the terminal of the command, for "
        "`breakpoint()`, pdb and `input()`"
    ),
    r"No space left on device": "a disk of {host} is full: `df -h` there, /tmp and /dev/shm included",
}
"""By a pattern of an error, or of the last lines of stderr if there is no error: the hint for it.

`{host}` stands for the host name, `{0}` for the first group of the pattern. Upper and lower case are the same.
"""

_SHARED_MEMORY = (
    "a mapped file could not be read or grown; if /dev/shm is full or small: `--shm-size` of docker, in Kubernetes an "
    "`emptyDir` of `medium: Memory` at /dev/shm, or fewer DataLoader workers"
)
_KILLED = (
    "raylaunch had not asked for its end: somebody's `kill -9`, a scheduler or the kernel killed it, or what had "
    "started it died; `dmesg` on {host} tells if it was the kernel"
)
_OUT_OF_MEMORY = (
    "use less host memory: fewer DataLoader workers, a smaller batch or cache, `map_location` in `torch.load`; or "
    "raise the limit"
)
_SILENT = (
    "no exception reached its end and stderr is empty: look for `sys.exit` or `os._exit`; a Python program that a "
    "command starts writes its traceback with `torch.distributed.elastic.multiprocessing.errors.record`"
)
_NOTE_HINTS = {
    STOPPED: "somebody stopped its process on {host} and did not let it go on: a debugger, `kill -STOP`, a scheduler "
    "that suspends jobs",
    CHILD_STOPPED: "somebody stopped a process that it started on {host}, such as one of its data loader, and did "
    "not let it go on: `ps -eo pid,stat,args` there shows it with state T",
    IN_THE_KERNEL: "it waits in the kernel of {host}: a disk, a network file system or a driver that does not answer; "
    "`dmesg` there tells",
    RUNNING_ON: "it ran on in code that takes no signals, or is no Python: `py-spy dump --native` on {host} shows it",
    FILE_CLOSED: "the script has closed descriptors that it had not opened, as `os.closerange(3, ...)` does: "
    "`py-spy dump` on {host} shows what it does",
    AFTER_END: "its script is done, and something that is freed then waits for a thread: `py-spy dump --native` on "
    "{host} shows what",
    NO_ANSWER: "no stack came from it: where it is no Python program, only its own logs can tell",
}
_LOADER = (
    "it waits for its data loader: a process of that may be deadlocked, or the storage of {host} stands still; with "
    "`timeout` a DataLoader raises an error instead"
)
_DIFFERENT_COLLECTIVES = (
    "ranks wait in different collectives: all must call the same ones in the same order, whatever their rank or data"
)
_ALL_WAIT = (
    "all ranks wait in the same collective, or one of them is gone from it: see if the nodes reach one another "
    "(`raylaunch check`), and if a rank left the loop before the others"
)
_WAITS_FOR_GPU = (
    "it seems to wait for its GPU, where a kernel of NCCL may wait for other ranks: all ranks must call the same "
    "collectives in the same order; `raylaunch check` shows if the nodes reach one another"
)
_SLOW = (
    "if it was only slow: `with raylaunch.worker.section(...)` around what takes long and makes no steps, or a longer "
    "`hang_timeout`, or `hang_timeout: off`"
)

_NO_STEPS = (
    "`hang_timeout` counts from the start of the workers, with imports and the first step; in a loop without an "
    "optimizer of torch, call `raylaunch.worker.heartbeat()`"
)


def hints(cause: Failure, unheard: tuple[int, ...] = (), stacks: tuple[StackGroup, ...] = ()) -> tuple[str, ...]:
    """Return at most a few hints about the root cause of an attempt.

    `unheard` are the ranks that ended with exit code 0, `stacks` the groups of a hang.
    """
    found = _of_hang(cause, stacks) if cause.hung else [*_of_message(cause), *_of_kills(cause)]
    if cause.is_collateral and not cause.hung:
        found.append(_of_lost_peer(unheard))
    if cause.exit_code > 0 and not cause.shell_signal and cause.error is None and not cause.tail.strip():
        found.append(_SILENT)
    return tuple(text.replace("{host}", cause.host or cause.node) for text in found)


def _of_hang(cause: Failure, stacks: tuple[StackGroup, ...]) -> list[str]:
    own = next((group for group in stacks if cause.rank in group.ranks), None)
    slow = [_NO_STEPS, _SLOW] if cause.hung.startswith(NO_FIRST_STEP) else [_SLOW]
    if own is None:
        return slow
    if own.note in _NOTE_HINTS:
        return [_NOTE_HINTS[own.note]]
    if own.loads_data:
        return [_LOADER, *slow]
    if own.waits:
        return [_DIFFERENT_COLLECTIVES if len(stacks) > 1 else _ALL_WAIT]
    return [_WAITS_FOR_GPU, *slow] if own.may_wait_for_gpu else slow


def _of_message(cause: Failure) -> list[str]:
    error = cause.exception
    text = error.text if error is not None else cause.tail
    return [
        hint.replace("{0}", match[1] if match.lastindex else "")
        for pattern, hint in PATTERNS.items()
        if (match := re.search(pattern, text, re.IGNORECASE)) is not None
    ]


def _of_kills(cause: Failure) -> list[str]:
    if cause.exception is not None:
        return []
    signal = cause.signal or cause.shell_signal
    if cause.evidence.startswith("out of memory"):
        return [_OUT_OF_MEMORY]
    if cause.evidence and signal == "SIGKILL":
        return [f"if it was among these: {_OUT_OF_MEMORY}"]
    return [{"SIGBUS": _SHARED_MEMORY, "SIGKILL": _KILLED}[signal]] if signal in ("SIGBUS", "SIGKILL") else []


def _of_lost_peer(unheard: tuple[int, ...]) -> str:
    if not unheard:
        return "it lost a peer, and no other failure is known: the logs of the other ranks may say more"
    ranks = ", ".join(map(str, unheard[:8])) + (", ..." if len(unheard) > 8 else "")  # noqa: PLR2004
    one = len(unheard) == 1
    return (
        f"it lost a peer, and no other failure is known; {'rank' if one else 'ranks'} {ranks} ended with exit code "
        f"0: did {'it' if one else 'they'} leave the loop before the others, with less data?"
    )
