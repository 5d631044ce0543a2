"""An error of the system names the limit that was met, with its value."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from raylaunch.node.linux import limits

ME = f"the agent (pid {os.getpid()})"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Files as the kernel has them: a machine with memory and process ids to spare, and no control groups."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self/statm").write_text("100 1 1\n")
    for path, text in {
        "sys/fs/file-max": "1000\n",
        "sys/kernel/threads-max": "900\n",
        "sys/kernel/pid_max": "800\n",
        "sys/vm/overcommit_memory": "0\n",
        "loadavg": "0.1 0.1 0.1 1/700 4711\n",
        "meminfo": "MemTotal: 2097152 kB\nMemAvailable: 1048576 kB\nCommitLimit: 99 kB\nCommitted_AS: 98 kB\n",
    }.items():
        (proc / path).parent.mkdir(parents=True, exist_ok=True)
        (proc / path).write_text(text)
    return proc


def put_into_group(proc: Path, mount: Path, controller: str, files: dict[str, str]) -> Path:
    """Let the process be in the group /job/inner, where the files are those of /job."""
    (mount / "job/inner").mkdir(parents=True)
    for name, text in files.items():
        (mount / "job" / name).write_text(text)
    (proc / "self/cgroup").write_text(f"7:{controller}:/job/inner\n0::/\n")
    (proc / "self/mountinfo").write_text(f"41 31 0:38 / {mount} rw - cgroup cgroup rw,{controller}\n")
    return mount / "job"


def test_open_files(proc: Path) -> None:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    text = limits.explained(OSError(errno.EMFILE, ""), "the agent", proc)
    assert text == f"Too many open files: {ME} may have {soft} open files (RLIMIT_NOFILE)"
    text = limits.explained(OSError(errno.ENFILE, ""), "the agent", proc)
    assert text == "Too many open files in system: this machine may have 1000 open files (fs.file-max)"
    (proc / "sys/fs/file-max").unlink()
    assert "no more open files" in limits.explained(OSError(errno.ENFILE, ""), "the agent", proc)


def test_processes(proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several limits, that of which the least is left: also one of a group that holds the process's own."""

    def why() -> str:
        return limits.explained(BlockingIOError(errno.EAGAIN, ""), "the agent", proc).removeprefix(
            "Resource temporarily unavailable: "
        )

    assert why() == "this machine may have 800 processes and threads (kernel.pid_max)"
    group = put_into_group(proc, tmp_path / "mnt", "pids", {"pids.max": "64\n", "pids.current": "64\n"})
    assert why() == f"the container may have 64 processes and threads (pids.max in {group})"
    (group / "pids.max").write_text("max\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (9, 9))
    (proc / "77").mkdir()
    (proc / "77/status").write_text(f"Name:\tx\nUid:\t{os.getuid()} 0 0 0\nThreads:\t9\n")
    assert why() == "the user with id 1000 may have 9 processes and threads (RLIMIT_NPROC)"


def test_memory(proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def why() -> str:
        return limits.explained(OSError(errno.ENOMEM, ""), "the agent", proc).removeprefix("Cannot allocate memory: ")

    assert why() == "1024 MiB of 2048 MiB of memory are free"
    (proc / "sys/vm/overcommit_memory").write_text("2\n")
    assert why() == "all processes may reserve 0 MiB of memory (vm.overcommit_memory is 2)"
    files = {"memory.max": f"{64 * 2**20}\n", "memory.current": f"{64 * 2**20}\n"}
    group = put_into_group(proc, tmp_path / "mnt", "memory", files)
    assert why() == f"the container may have 64 MiB of memory (memory.max in {group})"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**20, 2**20))
    (proc / "self/statm").write_text("1000 1 1\n")
    assert why() == "each process may have 1 MiB of address space (RLIMIT_AS)"


def test_what_is_no_shortage_or_not_known(tmp_path: Path) -> None:
    """The error alone is told, or that some limit was met."""
    assert limits.explained(OSError(errno.ENOENT, ""), "the agent", tmp_path) == "No such file or directory"
    assert limits.explained(OSError("odd"), "the agent", tmp_path) == "odd"
    text = limits.explained(BlockingIOError(errno.EAGAIN, ""), "the agent", tmp_path)
    assert text == "Resource temporarily unavailable: a limit of processes and threads was reached"
    assert "no memory left" in limits.explained(OSError(errno.ENOMEM, ""), "the agent", tmp_path)
