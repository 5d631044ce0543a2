"""Commands that are forked from a warm Python, with their output in pipes: as much of a `subprocess.Popen` as tests use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.warm_python import WarmPython


class WarmCommand:
    """`python -m MODULE ARGS`, whose modules are imported already. Both streams are text, in pipes."""

    def __init__(self, warm: WarmPython, module: str, *args: str, env: Mapping[str, str], cwd: Path) -> None:
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        with open(os.devnull) as nothing, open(out_end, "wb") as to_out, open(err_end, "wb") as to_err:
            self._forked = warm.start(module, args, env=env, cwd=cwd, files=(nothing, to_out, to_err))
        self.pid, self.poll, self.kill, self.wait = (
            *(self._forked.pid, self._forked.poll, self._forked.kill, self._forked.wait),
        )
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)

    @property
    def returncode(self) -> int | None:
        """The exit code, or the negative number of a signal; None until it was waited for."""
        return self._forked.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what it writes until it ends. `timeout`: seconds between its last output and its end."""
        with self.stdout, self.stderr, ThreadPoolExecutor() as pool:
            out, err = pool.map(lambda file: file.read(), (self.stdout, self.stderr))
        self.wait(timeout)
        return out, err
