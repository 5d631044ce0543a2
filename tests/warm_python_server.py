"""Forks a process for each request that runs a Python module: importing torch takes 2.5 s of CPU, importing Ray half of one.

Arguments: a socket of whole messages, and the modules to import. Each message is JSON (the keyword arguments of
`become`) with at least four files: stdin, stdout, stderr, and a pipe into which a line with the process id is written,
and one with the status of `wait` when it has ended. More files are opened for the process under the numbers `fds`.
In the fork, the module is run as `python -m` would run it, until exit handlers have run. Then the fork ends at once: to
free all that is imported would copy it first, which takes a third of a second of CPU.
"""

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading

MOST_BYTES = 1 << 20
MOST_FILES = 16
kept = []


def requests(sock):
    """Yield each message and its files, until nobody is left to send one."""
    while True:
        message, files, _, _ = socket.recv_fds(sock, MOST_BYTES, MOST_FILES)
        if not message:
            return
        yield json.loads(message), files


def forked(status):
    """Fork a process that tells of its child's end, and that child; true in the child."""
    if os.fork():
        return False
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        return True
    os.write(status, f"{pid}\n".encode())
    os.write(status, f"{os.waitpid(pid, 0)[1]}\n".encode())
    os._exit(0)


def become(files, *, module, argv, env, cwd, fds):
    """Be what `python -m module *argv` would have started."""
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    numbers = [0, 1, 2, *fds]
    spare = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(spare, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.stdout.reconfigure(write_through=bool(env.get("PYTHONUNBUFFERED")))
    sys.path[0] = cwd
    sys.argv = ["-m", *argv]
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)  # else `runpy` warns that it runs a second time


def main():
    sock = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy what it looks at
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nobody needs to wait for those who wait
    for request, (*files, status) in requests(sock):
        if forked(status):
            sock.close()
            os.close(status)
            become(files, **request)
            return request["module"]
        for file in (*files, status):
            os.close(file)
    return None


def run(module):
    """Run the module as `__main__`, and return the exit code.

    What it leaves is kept: a process group that is freed with the frames of an exception may wait for a thread of its
    own, which waits for the GIL.
    """
    try:
        kept.append(runpy.run_module(module, run_name="__main__", alter_sys=True))
    except SystemExit as stop:
        kept.append(stop)
        if not isinstance(stop.code, int | None):
            print(stop.code, file=sys.stderr)
            return 1
        return stop.code or 0
    except Exception as error:
        kept.append(error)
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__" and (module := main()):
    code = run(module)
    threading._shutdown()  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)
