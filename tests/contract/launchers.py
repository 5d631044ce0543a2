"""Run raylaunch or torchrun in a folder of its own with a clean environment, and find processes that are left behind."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.private_cluster import MARK, Cluster, end_marked, free_ports, marked
from tests.warm_python import ForkedProcess, WarmPython

SCRIPTS = Path(__file__).with_name("scripts")
LIMIT = 250.0
"""Seconds after which a run counts as hung."""

KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


FLAGS_SINCE_TORCH_2_6 = {
    "--shutdown-timeout": 1,
    "--signals-to-handle": 1,
    "--duplicate-stdout-filters": 1,
    "--duplicate-stderr-filters": 1,
    "--event-log-handler": 1,
    "--virtual-local-rank": 0,
    "--numa-binding": 1,
}
"""Flags of torchrun that the torch at hand may not have, and how many values each takes."""


@functools.cache
def missing_flags() -> frozenset[str]:
    """Return those that torchrun does not have here."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    text = Path(torch.origin).with_name("distributed").joinpath("run.py").read_text()
    return frozenset(flag for flag in FLAGS_SINCE_TORCH_2_6 if f'"{flag}"' not in text)


def without(args: Sequence[object], flags: Collection[str]) -> Iterator[object]:
    """Yield the arguments without these flags and their values."""
    rest = iter(args)
    for arg in rest:
        if arg in flags:
            for _ in range(FLAGS_SINCE_TORCH_2_6[str(arg)]):
                next(rest)
        else:
            yield arg


def for_torchrun(args: Sequence[object], env: Mapping[str, str]) -> list[object]:
    """Return the arguments as the torchrun at hand takes them.

    One without any of these flags needs a port too: several at one time would all take 29500.
    """
    missing = missing_flags()
    found = [*without(args, missing)]
    words = " ".join(map(str, found)).replace("_", "-")
    if "--shutdown-timeout" in missing and "PET_MASTER_PORT" not in env and not _CHOOSES_PORT.search(words):
        found[:0] = ["--master-port", free_ports(1)[0]]
    return found


_CHOOSES_PORT = re.compile(r"--(standalone|master-port|rdzv-endpoint)")


def clean_env() -> dict[str, str]:
    """Return the environment of a run: without settings of a launcher, of Ray or of pytest."""
    return {name: os.environ[name] for name in KEPT if name in os.environ}


def launcher_env(cluster: Cluster | None) -> dict[str, str]:
    """Return the environment of a launcher, which finds the cluster."""
    if cluster is None:
        return clean_env()
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": cluster.token}
    return clean_env() | token | {"RAY_ADDRESS": cluster.address}


def wait_until(condition: Callable[[], object], what: str, seconds: float = 100.0) -> None:
    """Wait until the condition is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:g} s in vain for {what}")
        time.sleep(0.02)


@dataclass
class Run:
    """A launcher's process and its folder, with the files that it and its workers wrote."""

    process: subprocess.Popen[bytes] | ForkedProcess
    folder: Path
    mark: str
    name: str = "terminal"
    left: list[int] = field(default_factory=list)
    peers: list[Run] = field(default_factory=list)
    """The launchers of the other nodes: torchrun has one per node."""

    @property
    def code(self) -> int:
        code = self.process.poll()
        assert code is not None, "it still runs"
        return code

    @property
    def out(self) -> str:
        return (self.folder / f"{self.name}.out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / f"{self.name}.err").read_text(errors="replace")

    @property
    def said(self) -> str:
        """The exit code and all output, for the message of a failed assertion."""
        return f"exit code {self.process.poll()}\nstdout:\n{self.out[-4000:]}\nstderr:\n{self.err[-8000:]}"

    def wait(self) -> Run:
        """Wait until the launcher and every process below it have ended."""
        try:
            self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.end()
            with (self.folder / f"{self.name}.err").open("a") as err:
                err.write(f"\nno end within {LIMIT:g} s: killed by the test\n")
        deadline = time.monotonic() + 100
        while (left := marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.left = left
        return self

    def end(self) -> None:
        """Kill the processes that still run."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        end_marked(self.mark)

    def alive(self, *pids: int) -> list[int]:
        """Return the pids that are running processes of this run: no zombies, and no others that got a reused pid."""
        return sorted(set(pids) & set(marked(self.mark)))

    def answer(self, name: str) -> Any:
        """Return the content of a JSON file that a script wrote."""
        path = self.folder / f"{name}.json"
        assert path.exists(), f"no {path.name}: {self.said}"
        return json.loads(path.read_text())

    def answers(self) -> dict[int, Any]:
        """Return what each rank wrote, by rank."""
        return {int(path.stem): json.loads(path.read_text()) for path in sorted(self.folder.glob("[0-9]*.json"))}

    def files(self, pattern: str) -> list[Path]:
        return sorted(self.folder.rglob(pattern))

    def wait_for(self, *names: str) -> Run:
        """Wait until these files exist; fail if the launcher ends before."""
        wait_until(
            lambda: all((self.folder / name).exists() for name in names) or self.process.poll() is not None,
            f"{names}",
            LIMIT,
        )
        assert all((self.folder / name).exists() for name in names), self.said
        return self


@dataclass
class Launcher:
    """raylaunch, with its cluster, or torchrun. `warm` is the process that it is forked from."""

    name: str
    new_folder: Callable[[], Path]
    warm: WarmPython
    cluster: Cluster | None = None
    runs: list[Run] = field(default_factory=list)

    @property
    def ours(self) -> bool:
        return self.name == "raylaunch"

    def either(self, raylaunch: Any, torchrun: Any) -> Any:
        """Return what is expected of this launcher, where the two differ on purpose."""
        return raylaunch if self.ours else torchrun

    def start(
        self,
        *args: object,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        torch: bool = False,
        legacy: str = "",
        local: bool = False,
        name: str = "terminal",
        bare: bool = False,
        fresh: bool = False,
        program: Path | None = None,
        stdin: str = "",
    ) -> Run:
        """Start the launcher.

        `torch`: the script uses torch, so raylaunch preloads it, and torchrun's workers are forked where it is imported.
        `legacy`: run `torch.distributed.launch`, or for `local-rank` raylaunch with `--pass-local-rank`. `local`:
        raylaunch runs without the cluster, which takes a quarter of the CPU time; only where agents run differs. `bare`:
        give it no arguments but `args`. `fresh`: start a new interpreter, as a person does, who does not set `preload`
        either; so do torchrun's workers. `program`: run this file in place of the launcher. `stdin`: its text.
        """
        if not self.ours and not program and not bare:
            args = tuple(for_torchrun(args, env or {}))
        folder = folder or self.new_folder()
        mark = secrets.token_hex(8)
        (folder / f"{name}.in").write_text(stdin)
        with contextlib.ExitStack() as files:
            out, err = (files.enter_context((folder / f"{name}.{end}").open("wb")) for end in ("out", "err"))
            stdin_file = files.enter_context((folder / f"{name}.in").open())
            whole_env = self.env() | {MARK: mark} | (env or {})
            if torch and not (self.ours or fresh):
                whole_env |= {"PYTHON_EXEC": str(self.warm.executable())}
            module = str(program) if program else self._module(legacy)
            argv = [*(() if bare or program else self._flags(torch, legacy, local, fresh)), *map(str, args)]
            process: subprocess.Popen[bytes] | ForkedProcess
            if fresh:
                command = [sys.executable, "-m", module, *argv]
                process = subprocess.Popen(
                    command, cwd=folder, env=whole_env, stdin=stdin_file, stdout=out, stderr=err, start_new_session=True
                )
            else:
                process = self.warm.start(module, argv, env=whole_env, cwd=folder, files=(stdin_file, out, err))
        run = Run(process, folder, mark, name)
        self.runs.append(run)
        return run

    def run(self, *args: object, **how: Any) -> Run:
        """Start the launcher and wait until it has ended."""
        return self.start(*args, **how).wait()

    def env(self) -> dict[str, str]:
        return launcher_env(self.cluster)

    def _module(self, legacy: str) -> str:
        return self.either("raylaunch", "torch.distributed.launch" if legacy else "torch.distributed.run")

    def _flags(self, torch: bool, legacy: str, local: bool, fresh: bool) -> list[str]:
        if not self.ours:
            return []
        preload = f"preload={['torch'] if torch else []}"
        return [
            *(("--set", "ray.address=none") if local else ("--set", "placement=pack")),
            *(() if fresh else ("--set", preload)),
            *(("--pass-local-rank",) if legacy == "local-rank" else ()),
        ]

    def left(self) -> list[str]:
        """End the processes that outlived their runs since the last call, and return their descriptions."""
        runs, self.runs = self.runs, []
        found = []
        for run in runs:
            if run.process.poll() is None or run.left:
                found.append(f"{run.process.args}: {run.left or 'itself'}")
                run.end()
        return found

    def script(self, name: str, folder: Path, to: str | None = None) -> str:
        """Copy one of `scripts/` into the folder and return its name there."""
        shutil.copy(SCRIPTS / name, folder / (to or name))
        return to or name


def together(work: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Run all tasks, three at a time: two cores, and one task that waits. Return the results by name."""
    with ThreadPoolExecutor(max_workers=3) as pool:
        waiting = {name: pool.submit(task) for name, task in work.items()}
        return {name: future.result() for name, future in waiting.items()}
