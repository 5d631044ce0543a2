"""What a person may do about a failure, where its own words or the evidence point at one thing."""

from __future__ import annotations

import re
from dataclasses import dataclass

from raylaunch.core.failure import Failure
from raylaunch.core.stacks import CHILD_STOPPED, IN_THE_KERNEL, NO_ANSWER, RUNNING_ON, STOPPED, StackGroup


@dataclass(frozen=True, slots=True)
class _Sign:
    """Words in an error, or in the last lines of stderr of a worker without one; and the hint they call for."""

    words: re.Pattern[str]
    hint: str


def _sign(words: str, hint: str) -> _Sign:
    return _Sign(re.compile(words, re.IGNORECASE), hint)


_SIGNS = (
    _sign(
        r"(?:CUDA|HIP) out of memory",
        "the memory of the GPU ran out: a smaller batch, gradient checkpointing, or, where much is reserved but "
        "unallocated, `PYTORCH_ALLOC_CONF=expandable_segments:True`",
    ),
    _sign(
        r"address already in use|EADDRINUSE",
        "the script opens a port that is in use on {host}: where it has a number of its own, use MASTER_ADDR and "
        "MASTER_PORT of the environment, or port 0",
    ),
    _sign(
        r"No module named '?([\w.]+)",
        "is `{0}` installed in the Python of {host}? Every node needs it",
    ),
    _sign(
        r"DataLoader worker .*is killed by signal: Killed",
        "a process that loads data was killed: fewer `num_workers`, if memory is short; `dmesg` on {host} tells",
    ),
    _sign(
        r"CUDA error: invalid device ordinal",
        "more workers than GPUs on {host}: `nproc_per_node` counts the workers of a node",
    ),
    _sign(
        r"Duplicate GPU detected",
        "two ranks use one GPU: the script must choose its own, `torch.cuda.set_device(int(os.environ['LOCAL_RANK']))`",
    ),
    _sign(
        r"No space left on device",
        "a disk of {host} is full: `df -h` there, /tmp and /dev/shm included",
    ),
)

_SHARED_MEMORY = (
    "a mapped file could not be read or grown; where /dev/shm is full or small: docker's `--shm-size`, in Kubernetes "
    "an `emptyDir` of `medium: Memory` at /dev/shm, or fewer DataLoader workers"
)
_KILLED = (
    "raylaunch had not asked for its end: somebody's `kill -9`, a scheduler or the kernel killed it, or what had "
    "started it died; `dmesg` on {host} tells if it was the kernel"
)
_OUT_OF_MEMORY = (
    "less host memory: fewer DataLoader workers, a smaller batch or cache, `map_location` where a checkpoint is "
    "loaded; or a higher limit"
)
_SILENT = (
    "no exception reached its end and stderr is empty: look for `sys.exit` or `os._exit`; a Python program that a "
    "command starts writes its traceback with `torch.distributed.elastic.multiprocessing.errors.record`"
)
_OF_NOTES = {
    STOPPED: "somebody stopped its process on {host} and did not let it go on: a debugger, `kill -STOP`, a scheduler "
    "that suspends jobs",
    CHILD_STOPPED: "somebody stopped a process that it started on {host}, such as one of its data loader, and did "
    "not let it go on: `ps -eo pid,stat,args` there shows it with state T",
    IN_THE_KERNEL: "it waits in the kernel of {host}: a disk, a network file system or a driver that does not answer; "
    "`dmesg` there tells",
    RUNNING_ON: "it ran on in code that takes no signals, or is no Python: `py-spy dump --native` on {host} shows it",
    NO_ANSWER: "no stack came from it: where it is no Python program, only its own logs can tell",
}
_LOADER = (
    "it waits for its data loader: a process of that may be deadlocked, or the storage of {host} stands still; with "
    "`timeout` a DataLoader raises an error instead"
)
_MEETING = (
    "ranks wait in different collectives: all must call the same ones in the same order, whatever their rank or data"
)
_ALL_WAIT = (
    "all ranks wait in the same collective, or one of them is gone from it: see if the nodes reach one another "
    "(`raylaunch check`), and if a rank left the loop before the others"
)
_SLOW = (
    "if it was only slow: `with raylaunch.worker.section(...)` around what takes long and makes no steps, or a longer "
    "`hang_timeout`, or `hang_timeout: off`"
)


def hints(cause: Failure, unheard: tuple[int, ...] = (), stacks: tuple[StackGroup, ...] = ()) -> tuple[str, ...]:
    """At most a few. Of its attempt: `unheard`, ranks that ended with exit code 0, and the `stacks` of a hang."""
    found = _of_hang(cause, stacks) if cause.hung else [*_of_words(cause), *_of_kills(cause)]
    if cause.is_collateral and not cause.hung:
        found.append(_of_echo(unheard))
    if cause.exit_code > 0 and not cause.shell_signal and cause.error is None and not cause.tail.strip():
        found.append(_SILENT)
    return tuple(text.replace("{host}", cause.host or cause.node) for text in found)


def _of_hang(cause: Failure, stacks: tuple[StackGroup, ...]) -> list[str]:
    own = next((group for group in stacks if cause.rank in group.ranks), None)
    if own is None:
        return [_SLOW]
    if own.note in _OF_NOTES:
        return [_OF_NOTES[own.note]]
    if own.loads_data:
        return [_LOADER, _SLOW]
    if own.waits:
        return [_MEETING if len(stacks) > 1 else _ALL_WAIT]
    return [_SLOW]


def _of_words(cause: Failure) -> list[str]:
    error = cause.exception
    text = error.text if error is not None else cause.tail
    return [
        sign.hint.replace("{0}", match[1] if match.lastindex else "")
        for sign in _SIGNS
        if (match := sign.words.search(text)) is not None
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


def _of_echo(unheard: tuple[int, ...]) -> str:
    if not unheard:
        return "it lost a peer, and no other failure is known: the logs of the other ranks may say more"
    ranks = ", ".join(map(str, unheard[:8])) + (", ..." if len(unheard) > 8 else "")  # noqa: PLR2004
    one = len(unheard) == 1
    return (
        f"it lost a peer, and no other failure is known; {'rank' if one else 'ranks'} {ranks} ended with exit code "
        f"0: did {'it' if one else 'they'} leave the loop before the others, with less data?"
    )
