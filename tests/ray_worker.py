"""What a raylet starts in place of a worker: has a warm Python fork the worker, since to import Ray takes 0.9 s of CPU.

Arguments: the socket of the warm Python, Ray's program for workers, and that program's arguments.
"""

import json
import os
import socket
import sys

NAMESPACES = ("uts", "ipc", "net", "pid", "time", "mnt")

# The language is for what would start the program.
argv = [word for word in sys.argv[3:] if word != "--language=PYTHON"]
request = {"module": sys.argv[2], "argv": argv, "env": dict(os.environ), "cwd": os.getcwd(), "fds": []}
namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
    sock.connect(sys.argv[1])
    message = json.dumps(request | {"namespaces": len(namespaces), "bound": True}).encode()
    socket.send_fds(sock, [message], [0, 1, 2, *namespaces, os.pidfd_open(os.getppid())])
