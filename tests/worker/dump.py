# ruff: noqa: E402, SIM115, ICN001
NAMES = sorted(globals())
FDS_LIMIT = 64

import atexit
import builtins
import decimal
import faulthandler
import gc
import json
import locale
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings

WITH_TORCH = "without-torch" not in sys.argv
if WITH_TORCH:
    import numpy
    import torch
    import torch.distributed


def stream(file):
    names = ("encoding", "errors", "line_buffering", "write_through", "newlines", "name", "mode", "closed")
    found = {name: repr(getattr(file, name)) for name in names}
    return found | {"tty": file.isatty(), "raw": type(file.buffer).__name__, "fd": file.fileno()}


def files():
    found = {}
    for fd in range(FDS_LIMIT):
        try:
            found[str(fd)] = os.readlink(f"/proc/self/fd/{fd}").split("/")[-1]
        except OSError:
            continue
    return found


umask = os.umask(0)
os.umask(umask)
spec = globals()["__spec__"]

dump = {
    "__main__ names": NAMES,
    "__main__ is it": sys.modules["__main__"].__dict__ is globals(),
    "__name__": __name__,
    "__file__": __file__,
    "__package__": __package__,
    "__doc__": __doc__,
    "__cached__": __cached__,
    "__loader__": [type(__loader__).__name__, getattr(__loader__, "path", "")],
    "__spec__": spec and [spec.name, spec.origin, spec.cached, spec.parent],
    "__annotations__": __annotations__,
    "builtins": sorted(name for name in dir(builtins) if name != "_"),
    "sys.argv": sys.argv,
    "sys.orig_argv": sys.orig_argv,
    "command line": open("/proc/self/cmdline").read().split("\0"),
    "process name": open("/proc/self/comm").read(),
    "sys.path": sys.path,
    "sys.executable": [sys.executable, sys.prefix, sys.base_prefix],
    "sys.flags": repr(sys.flags),
    "sys.warnoptions": [sys.warnoptions, sys._xoptions],  # noqa: SLF001
    "sys.path_hooks": len(sys.path_hooks),
    "sys hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, repr(sys.gettrace())],
    "sys limits": [sys.getrecursionlimit(), sys.getswitchinterval(), sys.dont_write_bytecode],
    "unraisable hook": sys.unraisablehook is sys.__unraisablehook__,
    "thread hook": threading.excepthook is threading.__excepthook__,
    "stdin": stream(sys.stdin),
    "stdin gives": sys.stdin.read(),
    "stdout": stream(sys.stdout),
    "stderr": stream(sys.stderr),
    "cwd": os.getcwd(),
    "umask": umask,
    "signal handlers": {int(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
    "ignored signals": [
        int(line.split()[1], 16) & ~(3 << 31)  # 32 and 33 are glibc's, whose posix_spawn may leave them ignored
        for line in open("/proc/self/status")
        if line.startswith("SigIgn")
    ],
    "blocked signals": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "wakeup fd": signal.set_wakeup_fd(-1),
    "timers": signal.getitimer(signal.ITIMER_REAL),
    "env": dict(os.environ),
    "limits": {
        name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT")
    },
    "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "affinity": sorted(os.sched_getaffinity(0)),
    "files": files(),
    "leads its group": os.getpgid(0) == os.getpid(),
    "leads its session": os.getsid(0) == os.getpid(),
    "children": open("/proc/self/task/" + str(os.getpid()) + "/children").read(),
    "multiprocessing": [
        multiprocessing.get_start_method(allow_none=True),
        multiprocessing.current_process().name,
        multiprocessing.parent_process() is None,
    ],
    "threads": [threading.active_count(), threading.current_thread() is threading.main_thread()],
    "kernel threads": len(os.listdir("/proc/self/task")),
    "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
    "frozen objects": gc.get_freeze_count() > 1000,  # Python 3.12 freezes some itself
    "logging": [len(logging.root.handlers), logging.root.level],
    "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(), sys.getfilesystemencoding()],
    "decimal": repr(decimal.getcontext()),
    "faulthandler": faulthandler.is_enabled(),
    "socket timeout": socket.getdefaulttimeout(),
    "time zone": time.tzname,
    "temporary folder": tempfile.gettempdir(),
    "exit handlers": atexit._ncallbacks(),  # noqa: SLF001
}
if WITH_TORCH:
    dump |= {
        "sys.meta_path": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
        "warnings filters": sorted(map(repr, warnings.filters)),
        "numpy errors": numpy.geterr(),
        "torch": [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_num_interop_threads()],
        "torch cuda": torch.cuda.is_initialized(),
        "torch threads": torch.get_num_threads(),
        "torch.distributed": [torch.distributed.is_initialized(), torch.distributed.is_torchelastic_launched()],
    }
print(json.dumps(dump))
