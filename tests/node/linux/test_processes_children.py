"""The children of a process, on kernels that list them and on kernels that do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from raylaunch.node.linux import processes


def test_children_are_found_without_the_kernel_s_list(monkeypatch) -> None:
    """/proc/PID/task/TID/children needs CONFIG_PROC_CHILDREN."""
    read = Path.read_text

    def refuse(path: Path, *args: object, **kwargs: object) -> str:
        if path.name == "children":
            raise FileNotFoundError(path)
        return read(path, *args, **kwargs)  # type: ignore[arg-type]

    child = subprocess.Popen([sys.executable, "-IS", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        listed = processes.children()
        monkeypatch.setattr(Path, "read_text", refuse)
        assert child.pid in listed
        assert processes.children() == listed
        assert os.getpid() in processes.children(os.getppid())
    finally:
        child.communicate()
