"""Forks a torchrun for each request: importing torch takes 2.5 s of CPU, and the tests start some thirty of them.

Argument: a socket of whole messages. Each is JSON ({"module", "argv", "env", "cwd"}) with four files: stdin, stdout,
stderr, and a pipe into which a line with the process id is written, and one with the status of `wait` when it has
ended. In the fork, the module is run as `python -m` would run it.
"""

import json
import os
import runpy
import signal
import socket
import sys

import torch.distributed.launcher.api
import torch.distributed.run

MOST = 1 << 20


def requests(sock):
    """Yield each message and its files, until nobody is left to send one."""
    while True:
        message, files, _, _ = socket.recv_fds(sock, MOST, 4)
        if not message:
            return
        yield json.loads(message), files


def forked(files):
    """Fork a process that tells of its child's end, and that child; true in the child."""
    if os.fork():
        return False
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        return True
    os.write(files[3], f"{pid}\n".encode())
    os.write(files[3], f"{os.waitpid(pid, 0)[1]}\n".encode())
    os._exit(0)


def become(request, files):
    """Be what `python -m` would have started."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    sys.path[0] = request["cwd"]
    path = os.path.dirname(torch.distributed.run.__file__)
    sys.argv = [f"{path}/{request['module'].rpartition('.')[2]}.py", *request["argv"]]


def main():
    sock = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nobody needs to wait for those who wait
    for request, files in requests(sock):
        if forked(files):
            sock.close()
            become(request, files)
            return request["module"]
        for file in files:
            os.close(file)
    return None


if __name__ == "__main__" and (module := main()):
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
