"""`python -m tools.bench [NAME ...]`: run the benches, print the table, write bench.json.

`--markdown` prints the table of bench.json as Markdown instead.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from tests.private_cluster import Cluster, private_cluster
from tools.bench import (
    cold,
    commit,
    commit_auto,
    detect,
    durable_write,
    follow,
    goodput,
    host_loss,
    leaks,
    local,
    logs,
    memory,
    overhead,
    planned,
    preload,
    restart,
    restart_ddp,
    restart_elastic,
    restart_heavy,
    restart_state,
    scale,
    tables,
    takeover,
    warm,
)
from tools.bench.contenders import CLUSTER_CPUS
from tools.bench.figures import Bench, Outcome
from tools.bench.processes import BenchError

BENCHES: dict[str, Bench] = {
    "restart": restart,
    "restart-ddp": restart_ddp,
    "restart-heavy": restart_heavy,
    "restart-state": restart_state,
    "restart-elastic": restart_elastic,
    "local": local,
    "cold": cold,
    "commit": commit,
    "commit-auto": commit_auto,
    "durable-write": durable_write,
    "host-loss": host_loss,
    "goodput": goodput,
    "planned": planned,
    "warm": warm,
    "memory": memory,
    "preload": preload,
    "overhead": overhead,
    "logs": logs,
    "follow": follow,
    "detect": detect,
    "scale": scale,
    "takeover": takeover,
    "leaks": leaks,
}
_RECORD = Path("bench.json")


def main() -> int:
    """Exit code 1 where a bench could not run; figures that miss a goal are figures."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}; all without one")
    parser.add_argument("--markdown", action="store_true", help=f"print the table of {_RECORD} and measure nothing")
    args = parser.parse_args()
    if unknown := set(args.names) - set(BENCHES):
        parser.error(f"no such bench: {', '.join(sorted(unknown))}")
    if args.markdown:
        print(_markdown(json.loads(_RECORD.read_text())))
        return 0
    return _run(args.names or [*BENCHES])


def _run(names: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, _stopped)
    scratch = Path(tempfile.mkdtemp(prefix="raylaunch-bench-"))
    try:
        outcomes = _measure(names, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if outcomes:
        print(f"\n{_words(_machine())}\n\n{tables.text([*outcomes.values()])}")
        _RECORD.write_text(json.dumps(_record(outcomes), indent=2) + "\n")
        print(f"\nall samples are in {_RECORD}")
    return 1 if len(outcomes) < len(names) else 0


def _stopped(_number: int, _frame: object) -> NoReturn:
    sys.exit(143)


def _measure(names: Sequence[str], scratch: Path) -> dict[str, Outcome]:
    """Those that need no cluster come first, on a machine without one. One that cannot run does not stop the others."""
    outcomes: dict[str, Outcome] = {}
    with contextlib.ExitStack() as stack:
        cluster: Cluster | None = None
        for name in sorted(names, key=_needs_cluster):
            if _needs_cluster(name) and cluster is None:
                try:
                    cluster = stack.enter_context(private_cluster(cpus=CLUSTER_CPUS))
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    print(f"no Ray cluster: {error}", file=sys.stderr)
                    break
            if outcome := _outcome(name, cluster, scratch):
                outcomes[name] = outcome
    return {name: outcomes[name] for name in names if name in outcomes}


def _needs_cluster(name: str) -> bool:
    return not getattr(BENCHES[name], "NO_CLUSTER", False)


def _outcome(name: str, cluster: Cluster | None, scratch: Path) -> Outcome | None:
    began = time.monotonic()
    print(f"{name} ...", end=" ", flush=True)
    try:
        outcome = BENCHES[name].measure(cluster, scratch)  # type: ignore[arg-type]  # None for those that need none
    except BenchError as error:
        print(f"could not run\n{error}", file=sys.stderr, flush=True)
        return None
    except Exception:
        print(f"could not run\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return None
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    return outcome


def _machine() -> dict[str, object]:
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "ray", "raylaunch")},
    }


def _words(machine: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def _record(outcomes: dict[str, Outcome]) -> dict[str, Any]:
    return {
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": _machine(),
        "benches": {
            name: {
                "figures": [figure.record() for figure in outcome.figures],
                "notes": list(outcome.notes),
                **outcome.more,
            }
            for name, outcome in outcomes.items()
        },
    }


def _markdown(record: dict[str, Any]) -> str:
    figures = [figure for bench in record["benches"].values() for figure in bench["figures"]]
    return f"{tables.markdown(figures)}\n\n{_words(record['machine'])}"


if __name__ == "__main__":
    sys.exit(main())
