"""The program: the command `raylaunch`, which `python -m raylaunch` is, too."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line and return its exit code, also if Ctrl-C comes while the modules for it are imported."""
    try:
        from raylaunch.cli import main as command_line  # noqa: PLC0415

        return command_line.main()
    except KeyboardInterrupt:
        sys.stderr.write("raylaunch: stopped before anything was started\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
