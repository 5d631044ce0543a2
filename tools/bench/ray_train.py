"""`unchanged.py` as Ray Train v2 runs it: `ray_train.py FOLDER DEATHS [options]`, on the cluster of RAY_ADDRESS.

BENCH_MODULE names another module with `work`, and BENCH_WORLD the number of workers.

Ray Train takes a function, not a script, and joins the process group before it calls it. So this function does what
the script does from there on. Workers have one CPU each; two agents with two workers each it does not know.

Its settings: what its documentation gives for a job that is to survive failures, and that the controller looks at the
workers each 0.1 s instead of 2 s. The other intervals among its environment variables (workers that hang, preemption,
the state actor) have no part in the restart after a death; the 5 s for which it waits for the workers that are left to
shut down are no setting. No checkpoint is saved and nothing is reported.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

_HERE = str(Path(__file__).parent)
_PASSED = ("BENCH_MODULE", "BENCH_TMPFS")
"""Variables that workers get: the variables of Ray's own processes are older."""


def train(config: dict[str, list[str]]) -> None:
    """What each worker calls."""
    sys.path.insert(0, _HERE)
    import unchanged

    os.environ.update(zip(_PASSED, config["passed"], strict=True))
    import_module(os.environ["BENCH_MODULE"]).work(unchanged.arguments(config["words"]))


def main(words: list[str]) -> None:
    """Until the training is done, or failed too often."""
    folder, deaths = Path(words[0]), int(words[1])
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.1"
    ray.init(log_to_driver=False)
    failures = FailureConfig(max_failures=deaths + 5)
    TorchTrainer(
        train,
        train_loop_config={"words": words, "passed": [os.environ[name] for name in _PASSED]},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=int(os.environ["BENCH_WORLD"]), use_gpu=False),
        run_config=RunConfig(name="bench", storage_path=str(folder / "storage"), failure_config=failures),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1:])
