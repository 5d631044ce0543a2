"""The self-check's command: its options, its end, what it prints at last."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Never

from raylaunch.core import checkup
from raylaunch.worker.selfcheck.council import AbsentError, Council, SilentError
from raylaunch.worker.selfcheck.course import FIRST_PATIENCE, Course
from raylaunch.worker.selfcheck.rendezvous import launch_store


def main(argv: Sequence[str] | None = None) -> int:
    """Check; 0 where nothing is wrong, on all ranks alike."""
    options = _parser().parse_args(argv)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return _error("RANK or WORLD_SIZE is not set: no launcher started this", "run it by `raylaunch check`", code=2)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _import_all()
    if rank == 0:
        print(f"waiting for all {size} ranks ..." if size > 1 else "one rank", file=sys.stderr, flush=True)
    try:
        store = launch_store(rank, size, timedelta(seconds=max(options.timeout, FIRST_PATIENCE)))
    except Exception as error:  # noqa: BLE001
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return _error(f"rank {rank} cannot use the store at {where}: {error}", "look for a firewall between the nodes")
    course = Course(council=Council(store, rank, size), timeout=options.timeout)
    try:
        course.run(options.backends, options.file)
    except AbsentError as absent:
        course.note_absent(absent)
        _show(course, options.json)
        course.council.dissolve()
        _cut(1)
    except SilentError as silent:
        _error(f"rank {rank}: {silent}", "look at rank 0's output and at its node")
        _cut(1)
    code = course.agree_on(_show(course, options.json))
    if course.has_leftovers:
        _cut(code)
    return code


def _import_all() -> None:
    """What the checks need, so that the time of none includes it; what torch will rename is no news here."""
    import torch._dynamo  # noqa: PLC0415
    import torch.distributed.device_mesh  # noqa: PLC0415
    import torch.distributed.fsdp  # noqa: F401, PLC0415

    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")


def _error(message: str, hint: str, *, code: int = 1) -> int:
    print(f"error: {message}\nhint: {hint}", file=sys.stderr, flush=True)
    return code


def _show(course: Course, path: str | None) -> int:
    """The table, and the rows as JSON; the exit code. Only rank 0 has all rows."""
    if course.council.rank == 0:
        print(f"\n{checkup.table(course.rows)}", end="", flush=True)
        try:
            _write(course, path)
        except OSError as error:
            return _error(f"cannot write `{path}`: {error.strerror}", "give `--json` a path that rank 0 can write")
    return checkup.exit_code(course.rows)


def _write(course: Course, path: str | None) -> None:
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump([asdict(row) for row in course.rows], file, indent=2)
            file.write("\n")


def _cut(code: int) -> Never:
    """End at once: threads and groups that were given up may wait for what never comes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m raylaunch.worker.selfcheck",
        description="Try every operation of torch.distributed between a job's workers.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=30.0, metavar="SECONDS", help="how long an operation may wait (default: 30)"
    )
    parser.add_argument(
        "--backends", type=_names, metavar="NAME,...", help="the backends to check (default: all that work here)"
    )
    parser.add_argument(
        "--file", metavar="PATH", help="where all nodes see the same files; files that begin so are made for file://"
    )
    parser.add_argument("--json", metavar="PATH", help="where rank 0 writes the rows")
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        msg = f"a time above 0 is needed, not {text}"
        raise argparse.ArgumentTypeError(msg)
    return seconds


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
