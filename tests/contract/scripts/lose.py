"""Wait until the agent is killed; workers of the next attempt end at once."""

import os
import time

if not os.path.exists("go"):
    name = f"up-{os.environ['RANK']}"
    with open(f"{name}.tmp", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{name}.tmp", name)
    time.sleep(600)
