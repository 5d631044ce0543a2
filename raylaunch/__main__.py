"""Run the command line: `python -m raylaunch` does the same as `raylaunch`."""

import sys

from raylaunch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
