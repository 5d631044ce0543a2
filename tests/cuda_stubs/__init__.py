"""Stubs of NVIDIA's driver libraries, for machines without a GPU: which processes touch CUDA, and how GPUs are counted.

Processes find them by LD_LIBRARY_PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_SOURCES = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Stubs:
    """The built libraries, and the file in which `libcuda.so.1` notes who uses it."""

    folder: Path

    @classmethod
    def build(cls, folder: Path, *, gpus: int) -> Stubs:
        """Compile them into a folder, for a machine with this number of GPUs."""
        found = cls(folder)
        for library, define in (("libcuda", f'LOG="{found.log}"'), ("libnvidia-ml", f"GPUS={gpus}")):
            command = [
                "cc",
                "-shared",
                "-fPIC",
                "-O1",
                "-Wall",
                "-Wextra",
                f"-D{define}",
                "-o",
                str(folder / f"{library}.so.1"),
            ]
            subprocess.run([*command, str(_SOURCES / f"{library}.c"), "-ldl"], check=True, timeout=100)
        return found

    @staticmethod
    def why_not() -> str:
        """Return why they cannot be built here; "" if they can."""
        return "" if shutil.which("cc") else "there is no C compiler"

    @property
    def log(self) -> Path:
        """Who uses CUDA."""
        return self.folder / "cuda.log"

    def env(self) -> dict[str, str]:
        """Return the variables by which a process finds the libraries."""
        return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(self.folder), os.environ.get("LD_LIBRARY_PATH"))))}

    def users(self) -> list[str]:
        """Return the titles of the processes that have initialized CUDA."""
        return [line.strip() for line in self.log.read_text().splitlines()] if self.log.exists() else []
