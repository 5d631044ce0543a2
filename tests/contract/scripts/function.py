"""Run a function with a launcher and write its results by rank. Argument: the launcher."""

import json
import sys


def work(offset):
    import os

    return offset + int(os.environ["RANK"])


def results(launcher):
    if launcher == "raylaunch":
        import raylaunch

        return raylaunch.launch(work, (10,), nproc_per_node=2, placement="pack", preload=["torch"], show="none")
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Forked, since spawned ones would import torch again.
    where = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "function", "start_method": "fork"}
    found = elastic_launch(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, **where), work)(10)
    return [found[rank] for rank in sorted(found)]


if __name__ == "__main__":
    with open("results.json", "w") as file:
        json.dump(results(sys.argv[1]), file)
