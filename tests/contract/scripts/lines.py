"""Write a thousand lines to each stream, as fast as possible."""

import os
import sys

for number in range(1000):
    print(f"out {os.environ['RANK']} {number}")
    print(f"err {os.environ['RANK']} {number}", file=sys.stderr)
