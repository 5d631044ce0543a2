"""`python -m raylaunch.worker.selfcheck`: see `program`."""

import sys

from raylaunch.worker.selfcheck.program import main

if __name__ == "__main__":
    sys.exit(main())
