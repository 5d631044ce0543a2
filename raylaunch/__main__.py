"""`python -m raylaunch` is `raylaunch`."""

import sys

from raylaunch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
