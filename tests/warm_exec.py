"""What is started in place of Python: has a warm Python fork what it is to run, since importing torch takes 2 s of CPU.

Arguments: the socket of the warm Python, then Python's own: `-u`, and a file or `-m` and a module, with its arguments.
The fork has the files that this one was started with, and is in the namespaces of this one. This one gets a signal in
place of the fork, passes it on to that and the children of that, and ends as the fork does. It is no stand-in for what is
killed by SIGKILL or has a controlling terminal.
"""

import contextlib
import json
import os
import signal
import socket
import sys

NAMESPACES = ("uts", "ipc", "net", "pid", "time", "mnt")
STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
IGNORED = [number for number in STOPS if signal.getsignal(number) is signal.SIG_IGN]
SIGNALS = [number for number in STOPS if number not in IGNORED]

inherited = [int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}")]
signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
argv = [word for word in sys.argv[2:4] if word != "-u"] + sys.argv[4:]
module, *argv = argv[1:] if argv[0] == "-m" else [os.path.abspath(argv[0]), *argv[1:]]
request = {"module": module, "argv": argv, "env": dict(os.environ), "cwd": os.getcwd(), "fds": inherited}
os.umask(umask := os.umask(0))
namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
request |= {"namespaces": len(namespaces), "bound": False, "inside": True}
request |= {"umask": umask, "ignored": IGNORED, "unbuffered": "-u" in sys.argv[2:4], "shown": True}
ours, theirs = os.pipe()
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
    sock.connect(sys.argv[1])
    socket.send_fds(sock, [json.dumps(request).encode()], [0, 1, 2, *inherited, *namespaces, theirs])
for each in (*namespaces, theirs):
    os.close(each)
with open(ours) as status:
    pid = int(status.readline())

    def pass_on(number, _):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:  # it has no group of its own yet, or has just ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    code = os.waitstatus_to_exitcode(int(status.readline()))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
