"""The self-check's command line, its output, and its exit code."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import NoReturn

from raylaunch.worker import torch_internals
from raylaunch.worker.selfcheck import findings
from raylaunch.worker.selfcheck.coordinator import AbsentError, Coordinator, SilentError
from raylaunch.worker.selfcheck.rendezvous import launch_store
from raylaunch.worker.selfcheck.runner import FIRST_TIMEOUT, CheckRunner


def main(argv: Sequence[str] | None = None) -> int:
    """Run the self-check, and return its exit code, which is the same on all ranks: 0 if nothing is wrong."""
    options = _parser().parse_args(argv)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return _error("RANK or WORLD_SIZE is not set: no launcher started this", "run it by `raylaunch check`", code=2)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _import_torch()
    if rank == 0:
        print(f"waiting for all {size} ranks ..." if size > 1 else "one rank", file=sys.stderr, flush=True)
    try:
        store = launch_store(rank, size, timedelta(seconds=max(options.timeout, FIRST_TIMEOUT)))
    except Exception as error:  # noqa: BLE001
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return _error(f"rank {rank} cannot use the store at {where}: {error}", "look for a firewall between the nodes")
    runner = CheckRunner(coordinator=Coordinator(store, rank, size), timeout=options.timeout)
    try:
        runner.run(options.backends, options.file)
    except AbsentError as absent:
        runner.record_absent(absent)
        report(runner, options.json)
        runner.coordinator.wait_until_absent_are_reported()
        _exit_now(1)
    except SilentError as silent:
        _error(f"rank {rank}: {silent}", "look at rank 0's output and at its node")
        _exit_now(1)
    code = runner.agree_on_exit_code(report(runner, options.json))
    if runner.has_leftovers:
        _exit_now(code)
    return code


def _import_torch() -> None:
    """Import what the checks need, so that no check's time includes it, and hide torch's FutureWarnings."""
    torch_internals.import_compiler()
    import torch.distributed.device_mesh  # noqa: PLC0415
    import torch.distributed.fsdp  # noqa: F401, PLC0415

    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")


def _error(message: str, hint: str, *, code: int = 1) -> int:
    print(f"error: {message}\nhint: {hint}", file=sys.stderr, flush=True)
    return code


def report(runner: CheckRunner, path: str | None) -> int:
    """Print the table, write the rows as JSON to `path`, and return the exit code. Only rank 0 prints and writes."""
    if runner.coordinator.rank == 0:
        print(f"\n{findings.table(runner.rows)}", end="", flush=True)
        try:
            _write(runner, path)
        except OSError as error:
            return _error(f"cannot write `{path}`: {error.strerror}", "give `--json` a path that rank 0 can write")
    return findings.exit_code(runner.rows)


def _write(runner: CheckRunner, path: str | None) -> None:
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump([asdict(row) for row in runner.rows], file, indent=2)
            file.write("\n")


def _exit_now(code: int) -> NoReturn:
    """Exit without waiting for threads and process groups that were abandoned."""
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
