"""The registry of runs: a small file for each run of this user, by which other commands find it.

The files are in `$XDG_STATE_HOME/raylaunch/runs`, by default below `~/.local/state`, which several machines may share.
A run never fails because of it: what cannot be written is one message, and a thread does what may wait for the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import cache
from hashlib import sha256
from pathlib import Path

import msgspec

from raylaunch.cluster.local.file_writer import FileWriter, open_private
from raylaunch.core.decoding import prepare
from raylaunch.errors import ExitCode, InterruptedByUserError, RaylaunchError
from raylaunch.node.linux import procfs
from raylaunch.node.protocol.acceptor import SecretAddress

MOST_ENDED = 300
"""So many of the runs that ended stay listed, the newest ones."""
MOST_ENTRIES = 1000
"""So many runs are listed in all. Of a run on another machine it is not always known that it ended."""
_SUFFIX = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverProcess:
    """Identifies the process of a driver: pids are used again, and belong to a machine and a PID namespace."""

    host: str
    pid: int
    started: int
    """When the process started, in clock ticks since the machine booted (proc_pid_stat(5))."""
    boot_id: str
    namespace: str
    """The PID namespace, as `/proc/self/ns/pid` names it."""

    @classmethod
    def this(cls) -> DriverProcess:
        """Return the identity of the calling process, which drives a run."""
        boot_id, namespace = _where()
        pid = os.getpid()
        return cls(
            host=socket.gethostname(), pid=pid, started=procfs.start_ticks(pid), boot_id=boot_id, namespace=namespace
        )

    @property
    def is_here(self) -> bool:
        """Whether its pid means a process that this one can see, or could see while it lived."""
        return (self.boot_id, self.namespace) == _where()

    @property
    def is_alive(self) -> bool | None:
        """Whether the process is there; None: it is on another machine, or in another container."""
        if self.is_here:
            return procfs.start_ticks(self.pid) == self.started and procfs.process_state(self.pid) not in ("Z", "X")
        has_rebooted = self.host == socket.gethostname() and self.boot_id != _where()[0]
        return False if has_rebooted else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredRun:
    """What is known of a run before its journal is read: an entry of the registry."""

    id: str
    name: str
    folder: str
    """The run folder; "" if nothing is kept."""
    driver: DriverProcess | None = None
    """None: of a folder that no registry has."""
    began: str = ""
    """The time of day, in ISO 8601; "": only the journal knows."""
    cluster: str = ""
    """The address of the Ray cluster; "" without one."""
    ended: str = ""
    """When it ended; "" if it has not, or if its driver could not tell."""
    exit_code: int | None = None
    control: SecretAddress | None = None
    """Where the driver answers what is asked of the run; None: nowhere, or not any more."""
    user: str = ""
    """The name of the user whose run it is."""
    renewed: float = 0.0
    """In the registry of the cluster: when the driver wrote it last, in seconds since 1970; 0: not known."""
    no_driver: str = ""
    """In the registry of the cluster: why no driver is in command of a detached run; `""`: one is, or was last."""
    token: str = ""
    """Of a detached run on a cluster, in which another driver may follow this one: it then replaces the entry."""

    @property
    def is_detached(self) -> bool:
        """Whether another driver may follow this one."""
        return self.token != ""

    @property
    def is_alive(self) -> bool | None:
        """Whether its driver is; None: not known, or the run may have another one by now."""
        return None if self.driver is None or (self.is_detached and not self.ended) else self.driver.is_alive

    @property
    def title(self) -> str:
        """Name and id, as messages name the run."""
        return f"{self.name} {self.id}"

    @property
    def identity(self) -> tuple[str, str]:
        """What its entries have in common, whichever driver made them."""
        return self.id, self.began


prepare(RegisteredRun)


def folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of the registry. It may not exist."""
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # "If an implementation encounters a relative path ... it should ... ignore it"
        state = str(Path("~/.local/state").expanduser())
    return Path(state) / "raylaunch" / "runs"


@contextlib.contextmanager
def entered(run: RegisteredRun, environ: Mapping[str, str], warn: Callable[[str], None]) -> Iterator[RegistryEntry]:
    """Keep a run in the registry while it lasts and, if it has a folder, afterwards too. `warn` takes a message."""
    entry = RegistryEntry(run, environ, warn)
    writer = FileWriter()
    writer.put(entry.add)
    try:
        yield entry
    except (RaylaunchError, InterruptedByUserError) as error:
        entry.exit_code = error.exit_code
        raise
    finally:
        writer.put(entry.end)
        writer.close()


class RegistryEntry:
    """The file of one run. Apart from `exit_code`, only one thread uses it."""

    def __init__(self, run: RegisteredRun, environ: Mapping[str, str], warn: Callable[[str], None]) -> None:
        self.exit_code = int(ExitCode.INTERNAL)
        self._run = run
        self._environ = environ
        self._warn = warn
        #: None: it was not written.
        self._path: Path | None = None

    def add(self) -> None:
        """Write the entry, and remove others if there are many."""
        registry = "the registry of runs"
        try:
            directory = folder(self._environ)
            registry = str(directory)
            _make_private(directory)
            began = re.sub(r"[^0-9T]", "", self._run.began)  # entries are sorted by their names
            key = sha256("\0".join(self._run.identity).encode()).hexdigest()[:8]  # the next driver replaces the entry
            path = directory / f"{began}-{key}{_SUFFIX}"
            _write(path, self._run)
            self._path = path
            if len(_files(directory)) > MOST_ENDED:
                prune(directory)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: there is no home
            why = getattr(error, "strerror", None) or error
            self._warn(
                f"`raylaunch ps` will not list this run: {registry} cannot be written: {why}; XDG_STATE_HOME may name "
                "another folder"
            )

    def end(self) -> None:
        """Write that the run has ended. The entry of a run without a folder is removed, and another driver's left."""
        with contextlib.suppress(OSError, ValueError):
            known = _read(self._path) if self._path is not None else None
            if known is not None and known.driver != self._run.driver:
                return
            if self._path is not None and self._run.folder:
                now = datetime.now(timezone.utc).isoformat()
                _write(self._path, replace(self._run, ended=now, exit_code=self.exit_code, control=None))
            elif self._path is not None:
                self._path.unlink(missing_ok=True)


def _write(path: Path, run: RegisteredRun) -> None:
    aside = path.with_name(f".{path.name}")
    with open_private(aside) as file:
        file.write(dump(run))
    aside.replace(path)


def _make_private(directory: Path) -> None:
    """Make the folder. Raises OSError, also in a home of another user, who could not use what we make there."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if existing.stat().st_uid != os.geteuid():
        raise PermissionError(13, f"{existing} belongs to another user")
    for path in (*reversed(directory.parents), directory):
        if existing in path.parents:
            with contextlib.suppress(FileExistsError):
                path.mkdir(0o700)


def runs(directory: Path) -> list[RegisteredRun]:
    """Return all runs of the registry, the newest first. Files that are no entries are left out."""
    return [run for path in reversed(_files(directory)) if (run := _read(path)) is not None]


def prune(directory: Path) -> None:
    """Remove the oldest entries of ended runs, and those whose folder is gone."""
    kept = ended = 0
    for path in reversed(_files(directory)):
        run = _read(path)
        alive = run is not None and run.driver is not None and not run.ended and run.driver.is_alive
        has_ended = run is None or run.ended != "" or alive is False
        is_surplus = (has_ended and ended >= MOST_ENDED) or (kept >= MOST_ENTRIES and not alive)
        if is_surplus or (run is not None and has_ended and _is_gone(run)):
            with contextlib.suppress(OSError):
                path.unlink()
        else:
            kept, ended = kept + 1, ended + has_ended


def _is_gone(run: RegisteredRun) -> bool:
    """Whether the folder was removed. Another machine may have it on a disk of its own."""
    is_here = run.driver is not None and run.driver.host == socket.gethostname()
    return not run.folder or (is_here and not os.path.lexists(run.folder))


def _files(directory: Path) -> list[Path]:
    """Return the files of the entries, the oldest first; none if the folder is missing or another user's."""
    with contextlib.suppress(OSError):
        if directory.stat().st_uid == os.geteuid():
            return sorted(path for path in directory.iterdir() if path.name.endswith(_SUFFIX) and path.name[0] != ".")
    return []


def _read(path: Path) -> RegisteredRun | None:
    with contextlib.suppress(OSError):  # removed just now
        return load(path.read_bytes())
    return None


def dump(run: RegisteredRun) -> str:
    """Return an entry as JSON. It has the secret of the run."""
    return json.dumps(asdict(run))


def load(text: bytes) -> RegisteredRun | None:
    """Return the entry that a JSON text has; None: it is none, or of another version."""
    try:
        return msgspec.convert(json.loads(text), RegisteredRun)
    except (ValueError, RecursionError):
        return None


@cache
def _where() -> tuple[str, str]:
    """Return the id of this boot of this machine, and the PID namespace; "" for what cannot be read."""
    found = ["", ""]
    with contextlib.suppress(OSError):
        found[0] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        found[1] = os.readlink("/proc/self/ns/pid")
    return found[0], found[1]
