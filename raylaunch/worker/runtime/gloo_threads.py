"""Lets gloo's threads finish what they have begun, before the process group that they belong to may be freed.

After a collective of a backward pass, the thread that has run it frees an object of Python's, for which it needs the
interpreter's lock. It may come to that much later, on a busy machine. If the group is freed meanwhile, its destructor
waits for the thread with the lock held, for ever (`~ProcessGroupGloo`, torch/csrc/distributed/c10d); and if the
interpreter ends meanwhile, the process is aborted. So a worker gives these threads time before either may happen.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

MOST_SECONDS = 30.0
"""How long a thread of gloo's may need."""
MOST_SECONDS_FOR_OTHERS = 0.5
"""How long any other thread may need: the user's own may run for ever, and not each torch names its threads."""
_SHORT = 0.001
"""Seconds. While this thread sleeps, others get the interpreter's lock."""
_NAME = "pt_gloo_runloop"
"""As torch names the threads that run collectives (`ProcessGroupGloo::runLoop`)."""
_AT_WORK = ("R", "D")
"""Process states (proc(5)) of a thread that runs, waits for a CPU, or for memory that was swapped out."""


def let_finish() -> None:
    """Return when no other thread of this process runs or waits for a CPU, or when it has had enough time for that."""
    began = time.monotonic()
    time.sleep(_SHORT)
    while names := set(_running_threads()):
        most = MOST_SECONDS if _NAME in names else MOST_SECONDS_FOR_OTHERS
        if time.monotonic() - began >= most:
            return
        time.sleep(_SHORT)


def _running_threads() -> Iterator[str]:
    """Yield the names of threads of this process that have something to do, besides the calling one."""
    own = str(threading.get_native_id())
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            with open(f"/proc/self/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
            if thread != own and rest.split()[0] in _AT_WORK:
                yield name
