"""Commands that are forked from a warm Python, with their output in pipes: as much of a `subprocess.Popen` as tests use."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Thread

from tests.warm_python import WarmPython


class WarmCommand:
    """`python -m MODULE ARGS`, whose modules are imported already. Both streams are text, in pipes.

    `beside`: it is to be in the namespaces of that process.
    """

    def __init__(
        self,
        warm: WarmPython,
        module: str,
        *args: str,
        env: Mapping[str, str],
        cwd: Path,
        beside: int | None = None,
    ) -> None:
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        with open(os.devnull) as nothing, open(out_end, "wb") as to_out, open(err_end, "wb") as to_err:
            files = (nothing, to_out, to_err)
            self._forked = warm.start(module, args, env=env, cwd=cwd, files=files, beside=beside)
        self.pid, self.poll, self.kill, self.wait = (
            *(self._forked.pid, self._forked.poll, self._forked.kill, self._forked.wait),
        )
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)

    @property
    def returncode(self) -> int | None:
        """The exit code, or the negative number of a signal; None until it was waited for."""
        return self._forked.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # as `subprocess.Popen` does
            os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what it writes until it ends. `timeout`: seconds until then."""
        deadline = time.monotonic() + timeout if timeout is not None else None
        said = ["", ""]

        def read(index: int) -> None:
            with (self.stdout, self.stderr)[index] as file:
                said[index] = file.read()

        threads = [Thread(target=read, args=(index,), daemon=True) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(deadline - time.monotonic() if deadline is not None else None)
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self._forked.args, timeout or 0.0)
        self.wait(max(0.0, deadline - time.monotonic()) if deadline is not None else None)
        return said[0], said[1]
