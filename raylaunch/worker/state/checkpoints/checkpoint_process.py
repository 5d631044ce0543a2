"""The program of a process in which a node writes commits to disk: `checkpoint_process.py REQUEST`.

`REQUEST` is JSON: the folder, how many checkpoints stay there, descriptors of the buffers, whether it is the end of the
run, and how many seconds to wait for other nodes. stdout gets lines of JSON: now and then how many bytes are "written"
and of how many ("total"), and at the end what a person must know, under "failed".

It ends with its agent, and leaves nothing incomplete then: also where nobody reads any more what it says.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Started by path: make our own package importable without putting the current folder on sys.path.
    sys.path[: not getattr(sys.flags, "safe_path", False)] = [__file__.rsplit("/", 5)[0]]

import contextlib
import json
import os
import signal
import threading
from typing import Any

from raylaunch.worker.state.checkpoints.durable_folder import LOW_PRIORITY, DurableFolder
from raylaunch.worker.state.commit_buffer import CommitBuffer

_SECONDS = 0.5
"""Between two lines."""


def main() -> None:
    """Write what the request says, and end the process: the end of a Python with torch takes long."""
    request = json.loads(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # in all threads
    if not request["is_end"]:
        os.nice(LOW_PRIORITY)
    folder = DurableFolder(request["folder"], 0.0, request["keep"])
    buffers = [CommitBuffer(fd) for fd in request["fds"]]
    from raylaunch.worker.state.checkpoints import checkpoint_writer  # noqa: PLC0415 - it imports torch

    progress = checkpoint_writer.WriteProgress()
    threading.Thread(target=_tell, args=(progress,), daemon=True).start()
    write = checkpoint_writer.write_newest if request["is_end"] else checkpoint_writer.write_checkpoint
    held = max((held for buffer in buffers if (held := buffer.header.held())), key=lambda one: one.commit, default=None)
    failed = checkpoint_writer.report(lambda: write(folder, buffers, request["seconds"], progress), folder, held)
    _say(failed=failed)
    os._exit(0)


def _tell(progress: Any) -> None:
    """Say how far the checkpoint is, until the agent is gone or sends SIGTERM; then remove it, and end the process.

    The main thread may be in a call of torch that writes a large tensor: no handler of a signal runs before its end.
    """
    with contextlib.suppress(OSError):  # nobody reads it any more
        while signal.sigtimedwait([signal.SIGTERM], _SECONDS) is None:
            _say(written=progress.written, total=progress.total)
    progress.discard()
    os._exit(1)


def _say(**what: object) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    main()
