"""Worker processes without a node: the test has the shared page, the files and the process.

As a program, `python -m tests.worker.alone SPEC_FD REPORT_FD STACKS_FD`, it does what a fork server does: it imports
torch and forks. Tests start it by a `WarmPython`, which has torch imported already.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import textwrap
import time

from raylaunch.worker.heartbeats import shared_page
from raylaunch.worker.runtime import boot
from raylaunch.worker.runtime.server_file import ServerFile
from raylaunch.worker.runtime.spec import WorkerSpec

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ATTEMPT = 3
SECONDS = 100.0
FIELDS = ("PROGRESS", "ALIVE_AT", "LAST_STEP", "POLLED_STEP", "SAVED_STEP", "WAITING_FOR_STOP", "BUSY", "OWNER_PID")


class Shared:
    """The shared page, as the agent has it. `page["FIELD"]` is a field of the slot of local rank 0."""

    def __init__(self):
        self.page, self.fd = shared_page.SharedPage.create()
        self.page.reset(ATTEMPT, 2)
        self.numbers = self.page.numbers

    def env(self, local_rank=0):
        return {
            shared_page.PAGE_VARIABLE: f"/proc/{os.getpid()}/fd/{self.fd}:{local_rank}",
            "RAYLAUNCH_ATTEMPT": str(ATTEMPT),
        }

    def __getitem__(self, field, local_rank=0):
        return self.numbers[shared_page.slot_offset(local_rank) + getattr(shared_page, field)]

    def slot(self, local_rank=0):
        """Return all fields of a slot that are not 0, except the time and the owner."""
        found = {name: self.__getitem__(name, local_rank) for name in FIELDS if name not in ("ALIVE_AT", "OWNER_PID")}
        return {name: value for name, value in found.items() if value}

    def request_save(self, steps):
        """Propose and commit a step to save after, as the agent does."""
        self.numbers[shared_page.COMMITTED_STEP] = steps
        self.numbers[shared_page.PROPOSED_STEP] = steps

    def propose(self, steps):
        self.numbers[shared_page.PROPOSED_STEP] = steps

    def commit(self):
        self.numbers[shared_page.COMMITTED_STEP] = self.numbers[shared_page.PROPOSED_STEP]

    def expire_lease(self):
        self.numbers[shared_page.LEASE_EXPIRES_AT] = 1

    def until(self, field, value, seconds=SECONDS):
        """Wait until a worker has written the value."""
        deadline = time.monotonic() + seconds
        while self[field] != value:
            assert time.monotonic() < deadline, f"{field} is {self[field]}, not {value}"
            time.sleep(0.002)


class Run:
    """A process with its output in files. `start` gets its stdin, stdout and stderr, and returns it."""

    def __init__(self, folder, start):
        self.out, self.err = folder / "out.log", folder / "err.log"
        with open(os.devnull) as nothing, self.out.open("w") as out, self.err.open("w") as err:
            self.process = start((nothing, out, err))

    @property
    def pid(self):
        return self.process.pid

    def code(self, seconds=SECONDS):
        return self.process.wait(timeout=seconds)

    def printed(self):
        """Return the words that it printed, after exit code 0."""
        code = self.code()
        assert code == 0, (code, self.err.read_text())
        return self.out.read_text().split()

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def environment(more):
    kept = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    path = {"PYTHONPATH": ROOT, "PYTHONDONTWRITEBYTECODE": "1"}
    return {name: os.environ[name] for name in kept if name in os.environ} | path | more


class Alone:
    """Starts such processes, and kills those that are left at the end."""

    def __init__(self, folder, warm):
        self.folder = folder
        self._warm = warm
        self.shared = Shared()
        self._runs = []
        self.fds = [self.shared.fd]

    def script(self, text, name="train.py"):
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    def python(self, text, env=None, command=()):
        """Start `python train.py`, or another command, in the environment of a worker."""
        path = self.script(text)
        command = command or (sys.executable, "-u", path)
        return self._started(command, self.shared.env() if env is None else env)

    def forked(self, text, env):
        """Start `python train.py` where torch is imported already."""
        return self.module(self.script(text), env=env)

    def worker(self, text, how="spawn"):
        """Start a worker as a node does."""
        spec = WorkerSpec(
            rank=0,
            local_rank=0,
            kind="script",
            target=self.script(text),
            env=environment(self.shared.env() | {"RANK": "0"}),
            cwd=str(self.folder),
            stdout=str(self.folder / "out.log"),
            stderr=str(self.folder / "err.log"),
        )
        self.report, self.stacks = self._memory("report"), self._memory("stacks")
        fds = (self._memory("spec", pickle.dumps(spec)), self.report, self.stacks)
        if how == "spawn":
            return self._started([sys.executable, "-u", boot.__file__, *map(str, fds)], self.shared.env(), fds)
        return self.module("tests.worker.alone", *map(str, fds), env=self.shared.env(), fds=fds)

    def module(self, name, *args, env, fds=()):
        """Start `python -u -m name` where torch is imported already."""
        return self._kept(
            lambda files: self._warm.start(name, args, env=environment(env), cwd=self.folder, files=files, fds=fds)
        )

    def wrote(self, fd):
        return os.pread(fd, 1 << 20, 0).decode()

    def _memory(self, name, content=b""):
        fd = os.memfd_create(name)
        os.write(fd, content)
        self.fds.append(fd)
        return fd

    def _started(self, command, env, fds=()):
        env = environment(env)
        names = ("stdin", "stdout", "stderr")
        return self._kept(
            lambda files: subprocess.Popen(
                command, env=env, cwd=self.folder, pass_fds=fds, **dict(zip(names, files, strict=True))
            )
        )

    def _kept(self, start):
        run = Run(self.folder, start)
        self._runs.append(run)
        return run

    def close(self):
        for run in self._runs:
            run.end()
        for fd in self.fds:
            os.close(fd)


def until(check, seconds=SECONDS):
    """Wait until `check` returns something true, and return that."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return found


def main():
    import torch  # noqa: F401

    spec_fd, report, stacks = map(int, sys.argv[1:])
    with open(spec_fd, "rb") as file:
        file.seek(0)
        spec = pickle.load(file)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        files = boot.WorkerFiles(*(ServerFile.inherited(fd, parent) for fd in (report, stacks)))
        boot.set_up_process(spec, files, parent)
        return boot.run(spec, files)
    with contextlib.suppress(KeyboardInterrupt):
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
