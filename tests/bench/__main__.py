"""`python -m tests.bench [restart|cold|memory]`: run them, print the table, write bench.json."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from tests.bench import cold, figures, memory, restart
from tests.bench.contenders import CLUSTER_CPUS
from tests.bench.figures import Bench, Outcome
from tests.bench.processes import BenchError
from tests.private_cluster import private_cluster

BENCHES: dict[str, Bench] = {"restart": restart, "cold": cold, "memory": memory}
_RECORD = Path("bench.json")


def main() -> int:
    """Exit code 1 where a bench could not run; figures that miss a goal are figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("only", nargs="?", choices=[*BENCHES], metavar="ONLY", help=f"one of {', '.join(BENCHES)}")
    only = parser.parse_args().only
    signal.signal(signal.SIGTERM, _stopped)
    scratch = Path(tempfile.mkdtemp(prefix="raylaunch-bench-"))
    try:
        outcomes, failed = _measure([only] if only else [*BENCHES], scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if outcomes:
        print(f"\n{_machine_line()}\n\n{figures.text([*outcomes.values()])}")
        _RECORD.write_text(json.dumps(_record(outcomes), indent=2) + "\n")
        print(f"\nall samples are in {_RECORD}")
    return 1 if failed else 0


def _stopped(_number: int, _frame: object) -> NoReturn:
    sys.exit(143)


def _measure(names: list[str], scratch: Path) -> tuple[dict[str, Outcome], bool]:
    """A bench that cannot run says why and does not keep the others from running."""
    outcomes: dict[str, Outcome] = {}
    try:
        with private_cluster(cpus=CLUSTER_CPUS) as cluster:
            for name in names:
                began = time.monotonic()
                print(f"{name} ...", end=" ", flush=True)
                try:
                    outcomes[name] = BENCHES[name].measure(cluster, scratch)
                    print(f"{time.monotonic() - began:.0f} s", flush=True)
                except BenchError as error:
                    print(f"could not run\n{error}", file=sys.stderr, flush=True)
                except Exception:
                    print(f"could not run\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"no Ray cluster: {error}", file=sys.stderr)
    return outcomes, len(outcomes) < len(names)


def _machine() -> dict[str, object]:
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "ray", "raylaunch")},
    }


def _machine_line() -> str:
    return ", ".join(f"{name} {value}" for name, value in _machine().items())


def _record(outcomes: dict[str, Outcome]) -> dict[str, object]:
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "benches": {
            name: {
                "figures": {figure.name.strip(" +"): figure.record() for figure in outcome.figures},
                "notes": list(outcome.notes),
                **outcome.more,
            }
            for name, outcome in outcomes.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
