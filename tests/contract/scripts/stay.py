"""Wait with a child process for a signal, and write which came. `deaf`: ignore signals; `alone`: without a child."""

import os
import signal
import subprocess
import sys
import time

rank = os.environ["RANK"]
ALL = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def told(number, frame):
    with open(f"told-{rank}", "a") as file:
        file.write(f"{signal.Signals(number).name}\n")
    sys.exit(0)


for number in ALL:
    signal.signal(number, signal.SIG_IGN if "deaf" in sys.argv else told)
child = None if "alone" in sys.argv else subprocess.Popen(["sleep", "600"])
with open(f"up-{rank}.tmp", "w") as file:
    file.write(
        f"{os.getpid()} {child.pid if child else os.getpid()} {os.environ.get('TORCHELASTIC_SIGNALS_TO_HANDLE', '-')}"
    )
os.rename(f"up-{rank}.tmp", f"up-{rank}")
while True:
    time.sleep(0.05)  # a signal that comes just before a long one is heard only after it
