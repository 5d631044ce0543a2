"""The program of a process in which a node writes commits to disk: `checkpoint_process.py REQUEST`.

`REQUEST` is JSON: the folder, how many checkpoints stay there, descriptors of the buffers, whether it is the end of the
run, and how many seconds to wait for other nodes. stdout gets a line of JSON: what a person must know, under "failed".

The process becomes a child of init, so that it goes on if the agent ends.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Started by path: make our own package importable without putting the current folder on sys.path.
    sys.path[: not getattr(sys.flags, "safe_path", False)] = [__file__.rsplit("/", 5)[0]]

import json
import os

from raylaunch.worker.state.checkpoints.durable_folder import LOW_PRIORITY, DurableFolder
from raylaunch.worker.state.commit_buffer import CommitBuffer


def main() -> int:
    """Write what the request says; return the exit code."""
    request = json.loads(sys.argv[1])
    if os.fork():
        os._exit(0)
    os.nice(LOW_PRIORITY)
    folder = DurableFolder(request["folder"], 0.0, request["keep"])
    buffers = [CommitBuffer(fd) for fd in request["fds"]]
    from raylaunch.worker.state.checkpoints import checkpoint_writer  # noqa: PLC0415 - it imports torch

    write = checkpoint_writer.write_newest if request["is_end"] else checkpoint_writer.write_checkpoint
    held = max((held for buffer in buffers if (held := buffer.header.held())), key=lambda one: one.commit, default=None)
    failed = checkpoint_writer.report(lambda: write(folder, buffers, request["seconds"]), folder, held)
    print(json.dumps({"failed": failed}), flush=True)  # the end of a process with torch takes long
    return 0


if __name__ == "__main__":
    sys.exit(main())
