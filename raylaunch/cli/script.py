"""Whether the script is there: asked before anything is started, where this machine can know the answer."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path

from raylaunch.cli.marks import Finding, Place
from raylaunch.cluster import here
from raylaunch.core.job import Job


def script_findings(job: Job, place: Place, variables: Mapping[str, str]) -> Iterator[Finding]:
    """What is wrong with the script's file. Absolute paths on a cluster are the nodes' own, and not looked at."""
    script = job.entrypoint.script
    if script is None:
        return
    local = job.ray.address == "local" or (job.ray.address == "auto" and variables.get("RAY_ADDRESS") == "local")
    local = local or here.is_alone(job.ray, variables)
    if Path(script).is_absolute() and not local:
        return
    folder = Path(job.ray.working_dir or ".")
    if not folder.is_dir():
        return  # an archive or an address, which Ray unpacks on the nodes
    path = folder / script
    if not path.exists():
        yield Finding(message=f"`{script}` does not exist", place=place, hint=_near(path, script))
    elif path.is_dir() and not (path / "__main__.py").is_file():
        message = f"`{script}` is a folder without a `__main__.py`"
        yield Finding(message=message, place=place, hint=_inside(path, script))
    elif not os.access(path, os.R_OK):
        yield Finding(message=f"`{script}` cannot be read: permission denied", place=place, hint=f"chmod +r {script}")
    elif path.is_file() and zipfile.is_zipfile(path) and "__main__.py" not in zipfile.ZipFile(path).namelist():
        yield Finding(message=f"`{script}` is an archive without a `__main__.py`", place=place)


def _near(path: Path, script: str) -> str:
    """The file that was probably meant."""
    if not path.parent.is_dir():
        return f"there is no folder `{Path(script).parent}`"
    names = [file.name for file in path.parent.iterdir()]
    close = get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"did you mean `{Path(script).with_name(close[0])}`?" if close else ""


def _inside(path: Path, script: str) -> str:
    scripts = sorted(file.name for file in path.glob("*.py"))
    return f"did you mean `{Path(script) / scripts[0]}`?" if len(scripts) == 1 else "name a file in it"
