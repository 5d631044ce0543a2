"""A head of Ray that is killed and started again: its process (the GCS), and the Redis in which it keeps its tables."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray._private.node import Node

from tests.private_cluster import marked

_SECONDS = 20.0


def why_not() -> str:
    """Return why there can be no Redis here; "": there can."""
    return "" if shutil.which("redis-server") else "redis-server is not installed"


def why_no_rocksdb() -> str:
    """Return why the head cannot keep its tables in a RocksDB; "": it can."""
    return "" if hasattr(Node, "_is_rocksdb_gcs") else f"Ray {ray.__version__} has no RocksDB"


def rocksdb(folder: Path) -> dict[str, str]:
    """Return the variables by which the head keeps its tables in files of this folder, without another process."""
    return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder)}


@contextlib.contextmanager
def redis(
    folder: Path,
    port: int,
    address: str = "127.0.0.1",
    popen: Callable[..., subprocess.Popen[Any]] = subprocess.Popen,
) -> Iterator[str]:
    """Run a Redis while the block lasts, and yield its address. It keeps what it has in memory, and writes no file."""
    command = ["redis-server", "--port", str(port), "--bind", address, "--save", "", "--appendonly", "no"]
    process = popen(
        [*command, "--protected-mode", "no", "--dir", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(str(line))
            if "Ready to accept connections" in str(line):
                break
        else:
            raise RuntimeError(f"Redis has ended: {''.join(said)}")
        yield f"{address}:{port}"
    finally:
        process.kill()
        process.wait()


class GcsProcess:
    """The GCS of a cluster, which can be killed and started again as it was, as who supervises a head does."""

    def __init__(self, pids: Iterable[int]) -> None:
        """Find it among these processes."""
        (self.pid,) = (pid for pid in pids if _arguments(pid)[:1] and _arguments(pid)[0].endswith("/gcs_server"))
        folder = Path(f"/proc/{self.pid}")
        self._command = _arguments(self.pid)
        environ = (folder / "environ").read_bytes().split(b"\0")
        self._env = dict(line.decode().split("=", 1) for line in environ if b"=" in line)
        self._cwd = os.readlink(folder / "cwd")
        self.process: subprocess.Popen[Any] | None = None

    @classmethod
    def of(cls, mark: str) -> GcsProcess:
        """Return that of the cluster with this mark."""
        return cls(marked(mark))

    def kill(self) -> None:
        """Kill it, and return when it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        deadline = time.monotonic() + _SECONDS
        while _arguments(self.pid) and time.monotonic() < deadline:
            time.sleep(0.01)

    def start(self, popen: Callable[..., subprocess.Popen[Any]] = subprocess.Popen) -> None:
        """Start it again, with the same ports."""
        self.process = popen(
            self._command,
            env=self._env,
            cwd=Path(self._cwd),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def end(self) -> None:
        """Kill it if it was started here, and wait for it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def _arguments(pid: int) -> list[str]:
    """Return the command line; none if the process is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    return []
