"""The files that a command line names: the job file, which is read here, and the script, which must exist."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path

from raylaunch.cli.args.diagnostics import Finding, SourceSpan
from raylaunch.cluster.session import discovery
from raylaunch.core.job.job import Job
from raylaunch.errors import ConfigError

MAX_BYTES = 256 * 1024
"""The size of a job file. PyYAML reads about 100 kB in a second."""


def read_job_file(name: str) -> str:
    """Return the text of a job file. Raises ConfigError if it cannot be read.

    A JSON file may be indented with tabs, which YAML forbids: they become spaces.
    """
    path = Path(name)
    data, hint = b"", ""
    try:
        # Without O_NONBLOCK, the open of a named pipe waits for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"error: `{name}` is not a regular file")
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"error: `{name}` has more than {MAX_BYTES // 1024} KiB, the limit of a job file")
        text = data.decode("utf-8-sig")
        return text.replace("\t", " ") if path.suffix == ".json" else text
    except (FileNotFoundError, NotADirectoryError):
        message, hint = f"`{name}` does not exist", _similar_file(path, path, "*.y*ml")
    except IsADirectoryError:
        message = f"`{name}` is a folder"
    except UnicodeDecodeError as error:
        lines = data[: error.start].split(b"\n")
        hint = "it looks like UTF-16; save it as UTF-8" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else ""
        message = f"`{name}` is not UTF-8\n --> {name}:{len(lines)}:{len(lines[-1]) + 1}"
    except OSError as error:
        message = f"`{name}` cannot be read: {str(error.strerror or error).lower()}"
    except ValueError:
        message = f"{name!r} cannot name a file"
    raise ConfigError(f"error: {message}" + f"\n  = {hint}" * bool(hint))


def script_findings(job: Job, span: SourceSpan, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is wrong with the script's file, before anything is started.

    A path that only other machines can check is not looked at: an absolute path on a cluster, or a working folder
    that Ray downloads.
    """
    script = job.entrypoint.script
    if script is None:
        return
    if Path(script).is_absolute() and not _is_run_here(job, environ):
        return
    folder = Path(job.ray.working_dir or ".")
    if not folder.is_dir():
        return  # an archive or a URL, which Ray unpacks on the nodes
    path = folder / script
    if not path.exists():
        yield Finding(message=f"`{script}` does not exist", span=span, hint=_similar_file(path, Path(script)))
    elif path.is_dir() and not (path / "__main__.py").is_file():
        message = f"`{script}` is a folder without a `__main__.py`"
        yield Finding(message=message, span=span, hint=_script_inside(path, script))
    elif not os.access(path, os.R_OK):
        yield Finding(message=f"`{script}` cannot be read: permission denied", span=span, hint=f"chmod +r {script}")
    elif path.is_file() and zipfile.is_zipfile(path) and "__main__.py" not in zipfile.ZipFile(path).namelist():
        yield Finding(message=f"`{script}` is an archive without a `__main__.py`", span=span)


def _is_run_here(job: Job, environ: Mapping[str, str]) -> bool:
    """Return whether the job runs on this machine only."""
    with_local_ray = job.ray.address == "auto" and environ.get("RAY_ADDRESS") == "local"
    return job.ray.address == "local" or with_local_ray or discovery.is_alone(job.ray, environ)


def _similar_file(path: Path, name: Path, pattern: str = "*") -> str:
    """Return a hint at the file that was probably meant, "" for none. `name` is the missing path as it was given."""
    if not path.parent.is_dir():
        return f"there is no folder `{name.parent}`"
    close = get_close_matches(path.name, [file.name for file in path.parent.glob(pattern)], n=1, cutoff=0.6)
    return f"did you mean `{name.with_name(close[0])}`?" if close else ""


def _script_inside(path: Path, script: str) -> str:
    scripts = sorted(file.name for file in path.glob("*.py"))
    return f"did you mean `{Path(script) / scripts[0]}`?" if len(scripts) == 1 else "name a file in it"
