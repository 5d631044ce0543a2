"""Write a worker's arguments, environment and folder to a file, without torch."""

import json
import os
import sys

rank = os.environ["RANK"]
print(f"out of {rank}")
print(f"err of {rank}", file=sys.stderr)
with open(f"{rank}.json", "w") as file:
    json.dump({"env": dict(os.environ), "argv": sys.argv, "name": __name__, "cwd": os.getcwd()}, file)
