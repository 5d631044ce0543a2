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
MOST_SECONDS_WITHOUT_NAMES = 0.5
"""How long any thread may need where torch does not name its own: it may be the user's, and run for ever."""
_SHORT = 0.001
"""Seconds. While this thread sleeps, others get the interpreter's lock."""
_NAME = "pt_gloo_runloop"
"""As torch names the threads that run collectives (`ProcessGroupGloo::runLoop`); older torches do not."""
_AT_WORK = ("R", "D")
"""Process states (proc(5)) of a thread that runs, waits for a CPU, or for memory that was swapped out."""


def let_finish() -> None:
    """Return when no thread of gloo's runs or waits for a CPU, or when it has had enough time for that.

    Only threads that run collectives count, where torch names them. gloo's `gloo_tcp_loop` never rests once the
    connections are shut down.
    """
    began = time.monotonic()
    time.sleep(_SHORT)
    while True:
        threads = list(_other_threads())
        own = [state for name, state in threads if name == _NAME]
        states, most = (own, MOST_SECONDS) if own else ([state for _, state in threads], MOST_SECONDS_WITHOUT_NAMES)
        if not any(state in _AT_WORK for state in states) or time.monotonic() - began >= most:
            return
        time.sleep(_SHORT)


def _other_threads() -> Iterator[tuple[str, str]]:
    """Yield the name and the state of each thread of this process except the calling one."""
    caller = str(threading.get_native_id())
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            with open(f"/proc/self/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
            if thread != caller:
                yield name, rest.split()[0]
