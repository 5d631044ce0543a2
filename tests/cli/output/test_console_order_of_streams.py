"""What a worker writes to stdout and stderr is shown in the order in which it was written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMMAND = (sys.executable, "-m", "raylaunch", "--standalone", "--set", "preload=[]")
SCRIPT = """
import sys
for epoch in range(300):
    print(f"{epoch} 100%\\r{epoch} 100%\\n", end="", file=sys.stderr)  # as tqdm does
    print(f"{epoch} done")
"""


def test_bars_and_lines(tmp_path: Path) -> None:
    """As under torchrun, whose workers have one terminal or pipe for both."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [*COMMAND, "--log-dir", str(tmp_path), str(tmp_path / "train.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0
    found = [line for line in done.stdout.split(b"\n") if b"raylaunch:" not in line and line]
    assert found == [part for n in range(300) for part in (b"%d 100%%\r%d 100%%" % (n, n), b"%d done" % n)]
