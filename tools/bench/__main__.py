"""`python -m tools.bench [NAME ...]`: run the benches, print the table, write bench.json.

`--markdown` prints the table of bench.json as Markdown instead. `--smoke` measures as little as a bench can, to see that
it runs; its figures mean nothing, and bench.json stays as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from tests.private_cluster import Cluster, private_cluster
from tools.bench import (
    claims,
    cold,
    commit,
    detect,
    follow,
    goodput,
    host_loss,
    leaks,
    local,
    logs,
    memory,
    notice,
    overhead,
    planned,
    preload,
    processes,
    restart,
    scale,
    tables,
    takeover,
    warm,
    worker_group,
)
from tools.bench.contenders import CLUSTER_CPUS
from tools.bench.figures import Bench, Outcome
from tools.bench.processes import BenchError

BENCHES: dict[str, Bench[Any]] = {
    **restart.BENCHES,
    "local": local.BENCH,
    "cold": cold.BENCH,
    **commit.BENCHES,
    "host-loss": host_loss.BENCH,
    "goodput": goodput.BENCH,
    "planned": planned.BENCH,
    "warm": warm.BENCH,
    "memory": memory.BENCH,
    "preload": preload.BENCH,
    "overhead": overhead.BENCH,
    "logs": logs.BENCH,
    "follow": follow.BENCH,
    "detect": detect.BENCH,
    "notice": notice.BENCH,
    "scale": scale.BENCH,
    "takeover": takeover.BENCH,
    "leaks": leaks.BENCH,
    "worker-group": worker_group.BENCH,
}
_RECORD = Path("bench.json")
_OBJECT_STORE = 400_000_000
"""Bytes, which are taken when there are objects."""


def main() -> int:
    """Exit code 1 where a bench could not run; figures that miss a goal are figures."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}; all without one")
    parser.add_argument("--markdown", action="store_true", help=f"print the table of {_RECORD} and measure nothing")
    parser.add_argument("--smoke", action="store_true", help="see whether the benches run, in seconds")
    args = parser.parse_args()
    if unknown := set(args.names) - set(BENCHES):
        parser.error(f"no such bench: {', '.join(sorted(unknown))}")
    if args.markdown:
        print(_markdown(json.loads(_RECORD.read_text())))
        return 0
    return _run(args.names or [*BENCHES], smoke=args.smoke)


def _run(names: Sequence[str], *, smoke: bool) -> int:
    signal.signal(signal.SIGTERM, _stopped)
    with processes.scratch() as scratch:
        outcomes = _measure(names, scratch, smoke=smoke)
    if outcomes:
        print(f"\n{_words(_machine())}\n\n{tables.text([*outcomes.values()])}")
        if not smoke:
            _RECORD.write_text(json.dumps(_record(outcomes), indent=2) + "\n")
            print(f"\nall samples are in {_RECORD}\n\n{claims.text(outcomes)}")
    if failed := [name for name in names if name not in outcomes]:
        print(f"\ncould not run: {', '.join(failed)}; see above", file=sys.stderr)
    return 1 if failed else 0


def _stopped(_number: int, _frame: object) -> NoReturn:
    sys.exit(143)


def _measure(names: Sequence[str], scratch: Path, *, smoke: bool) -> dict[str, Outcome]:
    """Those that need no cluster come first, on a machine without one. One that cannot run does not stop the others."""
    outcomes: dict[str, Outcome] = {}
    with contextlib.ExitStack() as stack:
        cluster: Cluster | None = None
        for name in sorted(names, key=lambda name: BENCHES[name].needs_cluster):
            if BENCHES[name].needs_cluster and cluster is None:
                try:
                    cluster = stack.enter_context(private_cluster(cpus=CLUSTER_CPUS, object_store=_OBJECT_STORE))
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    print(f"no Ray cluster: {error}", file=sys.stderr)
                    break
            if outcome := _outcome(name, cluster, scratch, smoke=smoke):
                outcomes[name] = outcome
    return {name: outcomes[name] for name in names if name in outcomes}


def _outcome(name: str, cluster: Cluster | None, scratch: Path, *, smoke: bool) -> Outcome | None:
    began, bench = time.monotonic(), BENCHES[name]
    print(f"{name} ...", end=" ", flush=True)
    try:
        outcome = bench.measure(cluster, scratch, bench.smoke if smoke else bench.full)
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
