"""`python -m tools.bench.profile_restart [N] [--ddp]`: where the time of raylaunch's restarts goes.

2 agents x 2 workers on one machine; N times (10) rank 1 kills itself. One table: from that SIGKILL until all ranks are
past their first `all_reduce` (or, with `--ddp`, their first optimizer step), station by station.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser

from tests.private_cluster import private_cluster
from tools.bench import processes, restart, timeline
from tools.bench.contenders import CLUSTER_CPUS, DDP_SCRIPT, SCRIPT, Task
from tools.bench.tables import aligned


def main() -> int:
    """Run one job, print its table."""
    parser = ArgumentParser(prog="python -m tools.bench.profile_restart", description=__doc__)
    parser.add_argument("deaths", nargs="?", type=int, default=10, metavar="N")
    parser.add_argument("--ddp", action="store_true")
    args = parser.parse_args()
    task = Task(agents=2, workers=2, deaths=args.deaths, script=DDP_SCRIPT if args.ddp else SCRIPT)
    with processes.scratch() as scratch, private_cluster(cpus=CLUSTER_CPUS) as cluster:
        job = restart.raylaunch(cluster, scratch, task)
    stations = timeline.STATIONS if args.ddp else timeline.WITHOUT_STEP
    title = f"{len(job.recoveries)} restarts, milliseconds after the kill:"
    detail = timeline.breakdown(title, job.recoveries, stations)
    print("\n".join([detail.title, "", *aligned([list(detail.columns), *map(list, detail.rows)])]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
