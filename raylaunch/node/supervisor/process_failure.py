"""What is known of a worker that died: its report, its error file, the end of its stderr, and other evidence.

Whether the kernel's OOM killer killed it, the kernel's counters and its log say (`OomKills`).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path, PurePath

from raylaunch.core.failures import error_file
from raylaunch.core.failures.failure import WorkerError
from raylaunch.core.failures.stacks import shortened
from raylaunch.core.machine.workers_status import WorkerExit
from raylaunch.core.record.run_layout import ERROR, STDERR, STDOUT
from raylaunch.core.text import capped
from raylaunch.node.linux import cgroups
from raylaunch.node.supervisor.attempt_state import ResultFile
from raylaunch.worker.runtime.process_setup import without_waiting

_READ_BYTES = 64 * 1024
_MOST_TAIL = 8192
"""Characters that are kept of what was read, in `_TAIL_LINES` lines at most."""
_TAIL_LINES = 20
_FRAME_OF_CPP = re.compile(r"frame #\d+: ")
_TERMINATED, _DUMP = "terminate called after throwing", "Fatal Python error: "
_OF_GPU = re.compile(r"\b(CUDA|NCCL|cu(BLAS|DNN|FFT|SPARSE|SOLVER)|DistBackendError)", re.IGNORECASE)
"""What the message of a failure mentions that its GPU may have caused."""
_MOST_ERROR_BYTES = 256 * 1024
_MOST_REASON = 200
"""Characters that say why an error file cannot be read."""
_CRASHES = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS}
_SHARED_MEMORY = "/dev/shm"  # noqa: S108
_SHELL = 128
"""A shell exits with this plus the number of the signal that killed its command."""
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO in `linux/proc_ns.h`.

The kernel's log has the process ids of this namespace, so it is of no use in a container that has its own.
"""
_KILL_RECORD = re.compile(
    rb"(?:(Memory cgroup out|Out) of memory[^:]*: )?Killed process (\d+) "
    rb".*?anon-rss:(\d+)kB, file-rss:(\d+)kB(?:, shmem-rss:(\d+)kB)?"
)
"""Written by `__oom_kill_process` in the kernel's `mm/oom_kill.c`."""
_LIMIT_TEXTS = {b"Memory cgroup out": " at its container's limit", b"Out": " when the machine had none left"}
_MAX_RECORDS = 5000
"""How many records of the log are read at once. Before a kill, the kernel lists every process that it could kill."""


def report(fd: int | None) -> tuple[WorkerError | None, ResultFile | None]:
    """Return the error that a worker reported in this file, and what its function returned or raised; None: nothing.

    What is incomplete, or of another form, is nothing too. The file is closed unless it has a result.
    """
    if fd is None:
        return None, None
    file = open(fd, "rb")  # noqa: SIM115
    error = None
    with contextlib.suppress(Exception):
        file.seek(0)
        error = pickle.load(file)  # noqa: S301
        if isinstance(error, WorkerError | None) and file.peek(1):
            return error, ResultFile(file)
    file.close()
    return error if isinstance(error, WorkerError) else None, None


def failure(
    exited: WorkerExit, folder: PurePath, oom_kills: OomKills, *, of_gpus: Callable[[int], str], kept: bool
) -> WorkerExit:
    """Return the exit with all that can be found out about it. Leaves an error file where the worker left none.

    `folder` is the worker's own. `of_gpus` returns what is wrong with a rank's GPUs. `kept` False: the folder is
    removed with the run, so the failure names no path in it.
    """
    path = Path(folder / ERROR)
    error, spoilt = _recorded(path)
    if exited.error is not None:
        error = _with_record(exited.error, error)
        if not os.path.lexists(path):
            _write(path, error)
    last_lines = tail(Path(folder / STDERR))
    evidence = ""
    if not exited.stopped:
        evidence = _evidence(exited.exit_code, exited.pid, last_lines, oom_kills)
        if _OF_GPU.search(error.text if error is not None else last_lines) or exited.exit_code in _CRASHES:
            evidence = "; ".join(filter(None, (evidence, of_gpus(exited.rank))))
    return replace(
        exited,
        host=socket.gethostname(),
        error=error,
        error_file=str(path) if kept and path.exists() else "",
        spoilt=spoilt,
        evidence=evidence,
        stdout=str(folder / STDOUT) if kept else "",
        stderr=str(folder / STDERR) if kept else "",
        tail=last_lines,
    )


def _recorded(path: Path) -> tuple[WorkerError | None, str]:
    """Return what the error file says, and why it cannot be read (`""` where it can, or where there is none)."""
    try:
        with open(path, "rb", opener=without_waiting) as file:
            data = file.read(_MOST_ERROR_BYTES + 1) or b""
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except OSError as error:
        return None, str(error.strerror)
    if len(data) > _MOST_ERROR_BYTES:
        return None, f"it has more than {_MOST_ERROR_BYTES // 1024} KiB"
    try:
        return error_file.parse(data.decode()), ""
    except (ValueError, RecursionError) as error:
        return None, capped(str(error), _MOST_REASON)


def _with_record(error: WorkerError, recorded: WorkerError | None) -> WorkerError:
    """Return a reported error. If the error file has the same one, its time and its text are kept."""
    if recorded is None or (recorded.type, recorded.message) != (error.type, error.message):
        return error
    return replace(error, timestamp=recorded.timestamp, written=recorded.written)


def _write(path: Path, error: WorkerError) -> None:
    """Write an error file in the form of torchelastic's `@record`, for tools that read those. Errors are ignored."""
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8", opener=_private) as file:
        file.write(error_file.compose(error))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _evidence(exit_code: int, pid: int, last_lines: str, kills: OomKills) -> str:
    """Return what else is known of a death by signal."""
    match exit_code:
        case 0:
            return "before its function returned"
        case _ if exit_code == -signal.SIGKILL:
            return kills.evidence(pid or None)
        case _ if exit_code == _SHELL + signal.SIGKILL:
            return kills.evidence(None)  # what was killed is a child of the worker
        case _ if exit_code == -signal.SIGABRT and "std::bad_alloc" in last_lines:
            return "out of memory: std::bad_alloc"
        case _ if exit_code == -signal.SIGBUS:
            return shared_memory_use()
        case _:
            return ""


def shared_memory_use(path: str = _SHARED_MEMORY) -> str:
    """Return how full /dev/shm is: the most common reason for SIGBUS."""
    try:
        found = os.statvfs(path)
    except OSError:
        return ""
    size, free = (blocks * found.f_frsize / 2**20 for blocks in (found.f_blocks, found.f_bavail))
    return f"{path}: {size - free:.0f} of {size:.0f} MiB in use"


def tail(path: Path) -> str:
    """Return the last lines of a log file; `""` where there is none."""
    try:
        with open(path, "rb", opener=without_waiting) as file:
            before = max(0, file.seek(0, os.SEEK_END) - _READ_BYTES)
            file.seek(before)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    if before and len(lines) > 1:
        del lines[0]  # a part of a line: a secret cut in two would not be redacted
    found = shortened(_without_stacks(lines))
    while found and not found[-1].strip():  # the blank line before the list of modules
        del found[-1]
    found = found[-_TAIL_LINES:]
    while len(found) > 1 and sum(map(len, found)) > _MOST_TAIL:
        del found[0]
    return "\n".join(found)[-_MOST_TAIL:]


def _without_stacks(lines: list[str]) -> list[str]:
    """Return the lines without those behind which the error of a thread of C++ would disappear.

    NCCL's watchdog prints its error with its frames, and throws it. Then faulthandler prints the stacks of all threads,
    and the one that failed has none of Python's.
    """
    thrown = next((at for at, line in enumerate(lines) if line.startswith(_TERMINATED)), len(lines))
    end = next((at for at in range(thrown, len(lines)) if lines[at].startswith(_DUMP)), len(lines))
    return [line for line in lines[:end] if not _FRAME_OF_CPP.match(line)]


class OomKills:
    """The processes that the OOM killer has killed on this machine since the last `reset`.

    Where it has killed none, a question costs two reads of small files, and the log is not read.
    """

    def __init__(self, proc: Path = Path("/proc"), log: Path = Path("/dev/kmsg")) -> None:
        self._machine_counter = proc / "vmstat"
        self._cgroup_counter = cgroup_counter(proc / "self")
        self._counts_before = self._counts()
        self._evidence_by_pid: dict[int, str] = {}
        self._log_fd = _open_log(proc, log)

    @property
    def reads_log(self) -> bool:
        """Whether the kernel's log can be read, and names processes by the ids that they have here."""
        return self._log_fd is not None

    def reset(self) -> None:
        """Forget all kills until now: process ids are used again."""
        self._counts_before = self._counts()
        self._evidence_by_pid.clear()
        if self._log_fd is not None:
            with contextlib.suppress(OSError):
                os.lseek(self._log_fd, 0, os.SEEK_END)

    def evidence(self, pid: int | None) -> str:
        """Return a text that says why a process that died by SIGKILL may have lacked memory, or `""`.

        None stands for a process whose id is not known.
        """
        machine, cgroup = (
            None if now is None or before is None else now - before
            for now, before in zip(self._counts(), self._counts_before, strict=True)
        )
        if machine == 0 and not cgroup:
            return ""
        if pid is not None:
            self._evidence_by_pid |= dict(self._new_log_records())
            if pid in self._evidence_by_pid:
                return self._evidence_by_pid[pid]
        if cgroup:
            return _count_text(cgroup, "container")
        return _count_text(machine, "machine") if machine and cgroup is None else ""

    def close(self) -> None:
        """Close the kernel's log, if it was opened."""
        if self._log_fd is not None:
            os.close(self._log_fd)
            self._log_fd = None

    def _counts(self) -> tuple[int | None, int | None]:
        return _read_oom_kill(self._machine_counter), _read_oom_kill(self._cgroup_counter)

    def _new_log_records(self) -> Iterator[tuple[int, str]]:
        """Yield process id and evidence for each kill in the log since the last call."""
        if self._log_fd is None:
            return
        for _ in range(_MAX_RECORDS):
            try:
                record = os.read(self._log_fd, 8192)
            except BrokenPipeError:
                continue  # records were overwritten before they were read; the next read returns the oldest left
            except OSError:
                return
            if not record:
                return
            found = _KILL_RECORD.findall(record) if b"Killed process" in record else []  # the plain search is faster
            for limit, pid, *sizes in found:
                resident = sum(int(size or 0) for size in sizes) / 1024
                where = _LIMIT_TEXTS.get(limit, "")
                yield int(pid), f"out of memory: the kernel killed it{where}, {resident:.0f} MiB resident"


def _open_log(proc: Path, path: Path) -> int | None:
    try:
        if os.readlink(proc / "self/ns/pid") != _INITIAL_PID_NAMESPACE:
            return None
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(log, 0, os.SEEK_END)
    except OSError:
        return None
    return log


def _count_text(count: int, where: str) -> str:
    processes = "process" if count == 1 else "processes"
    return f"the kernel killed {count} {processes} of this {where} for lack of memory meanwhile"


def _read_oom_kill(path: Path | None) -> int | None:
    """Read the line `oom_kill N`, which /proc/vmstat and the memory files of both cgroup versions have."""
    if path is None:
        return None
    try:
        found = re.search(rb"^oom_kill (\d+)$", path.read_bytes(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found is not None else None


def cgroup_counter(process: Path) -> Path | None:
    """Return the file that counts OOM kills in the memory cgroup of a process, given as `/proc/PID`.

    That is `memory.events` of cgroup v2, which also counts kills in child cgroups
    (`Documentation/admin-guide/cgroup-v2.rst` of the kernel), or `memory.oom_control` of cgroup v1, which does not.
    """
    for folder in cgroups.folders(process, "memory"):
        for name in ("memory.oom_control", "memory.events"):
            if _read_oom_kill(folder / name) is not None:
                return folder / name
    return None
