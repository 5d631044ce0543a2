"""A script whose last rank fails under torch's `@record` while the others wait. Argument: `raise` or `exit`."""

import os
import subprocess
import sys
import time


def main():
    if int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"]) - 1:
        child = subprocess.Popen(["sleep", "600"])
        with open("pids.tmp", "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        os.rename("pids.tmp", "pids")
        time.sleep(600)
    while int(os.environ["WORLD_SIZE"]) > 1 and not os.path.exists("pids"):
        time.sleep(0.02)
    if sys.argv[1] == "raise":
        raise RuntimeError("no such shard")
    sys.exit(138)


if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
    from torch.distributed.elastic.multiprocessing.errors import record

    main = record(main)
main()
