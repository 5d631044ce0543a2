"""Forks a process for each request that runs a Python module: importing torch takes 2.5 s of CPU, importing Ray half of one.

Arguments: a socket of whole messages, perhaps a comma and one more that anybody can send to, and the modules to import.
The server ends when nobody holds the other end of the first socket. Each message is JSON (the keyword arguments of
`become`, how many `namespaces`, and whether it is `bound`) with these files: stdin, stdout, stderr; those that are opened
for the process under the numbers `fds`; the namespaces that it is to be in; and last, a pipe into which a line with the
process id is written (with `inside`, the one that it has in those namespaces), and one with the status of `wait` when it
has ended. Of what is `bound`, the last is a pidfd instead: when that process ends, the fork is killed.
In the fork, a module is run as `python -m` would run it, and a file as `python` would, until exit handlers have run.
Then the fork ends at once: to free all that is imported would copy it first, which takes a third of a second of CPU.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types

MOST_BYTES = 1 << 20
MOST_FILES = 16
MARK = "RAYLAUNCH_TEST_MARK"
NO_FULL_COLLECTIONS = 1_000_000_000
LIBC = ctypes.CDLL(None, use_errno=True)
OURS = {os.stat(path).st_ino for path in os.scandir("/proc/self/ns")}
kept = []


def requests(sock, named):
    """Yield each message and its files, until nobody has the other end of `sock`."""
    while True:
        for ready in select.select([sock, *named], [], [])[0]:
            message, files, _, _ = socket.recv_fds(ready, MOST_BYTES, MOST_FILES)
            if not message:
                return
            yield json.loads(message), files


def forked(last, namespaces, bound, inside):
    """Fork a process that enters the namespaces, and its child; true in the child. The first waits for the other."""
    if os.fork():
        return False
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for file in namespaces:
        if os.fstat(file).st_ino not in OURS and LIBC.setns(file, 0):
            raise OSError(ctypes.get_errno(), "setns")
    pid = os.fork()
    if pid == 0:
        if inside:
            os.write(last, f"{os.getpid()}\n".encode())
        return True
    if bound:
        if last in select.select([last, os.pidfd_open(pid)], [], [])[0]:
            os.kill(pid, signal.SIGKILL)
    else:
        if not inside:
            os.write(last, f"{pid}\n".encode())
        os.write(last, f"{os.waitpid(pid, 0)[1]}\n".encode())
    os._exit(0)


def show(env):
    """Let /proc/PID/environ have these variables, as far as there is room: tests find what they started by its mark."""
    with open("/proc/self/stat") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[47:49])
    variables = sorted(env.items(), key=lambda item: item[0] != MARK)
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables)
    ctypes.memmove(start, text[: end - start].ljust(end - start, b"\0"), end - start)


def raw(fd, **more):
    """Return a stream for this file that buffers nothing, as under `-u`."""
    stream = io.TextIOWrapper(os.fdopen(fd, "wb", buffering=0, closefd=False), write_through=True, **more)
    stream.mode = "w"
    return stream


def become(files, *, module, argv, env, cwd, fds, umask=None, ignored=(), unbuffered=False, shown=False):
    """Be what `python -m module *argv` or `python file *argv` would have started.

    `ignored`: numbers of signals; `unbuffered`: as with `-u`; `shown`: others see its environment.
    """
    os.setsid()
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    if umask is not None:
        os.umask(umask)
    os.environ.clear()
    os.environ.update(env)
    if shown:
        show(env)
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
    if unbuffered or env.get("PYTHONUNBUFFERED"):
        sys.stdout, sys.stderr = raw(1), raw(2, errors="backslashreplace", line_buffering=True)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    if module.endswith(".py"):
        sys.path[0], sys.argv = os.path.dirname(module), [module, *argv]
    else:
        sys.path[0], sys.argv = cwd, ["-m", *argv]
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)  # else `runpy` warns that it runs a second time


def main():
    sock, *named = (socket.socket(fileno=int(number)) for number in sys.argv[1].split(","))
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], NO_FULL_COLLECTIONS)  # they would take a fifth of the time
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy what it looks at
    gc.set_threshold(*thresholds)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nobody needs to wait for those who wait
    for request, (*files, last) in requests(sock, named):
        first = len(files) - request.pop("namespaces")
        entered = files[first:]
        if forked(last, entered, request.pop("bound"), request.pop("inside", False)):
            for each in (sock, *named):
                each.close()
            for file in (*entered, last):
                os.close(file)
            become(files[:first], **request)
            return request["module"]
        for file in (*files, last):
            os.close(file)
    return None


def run(module):
    """Run the module or file as `__main__`, which stays that for threads and exit handlers, and return the exit code.

    What it leaves is kept: a process group that is freed with the frames of an exception may wait for a thread of its
    own, which waits for the GIL.
    """
    kept.append(sys.modules["__main__"])
    sys.modules["__main__"] = script = types.ModuleType("__main__")
    try:
        if module.endswith(".py"):
            with open(module, "rb") as file:
                code = compile(file.read(), module, "exec")
            script.__file__ = module
            exec(code, vars(script))
        else:
            runpy._run_module_as_main(module)  # noqa: SLF001
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
