"""Right and wrong calls of the Python API, which `make check` gives to mypy and nobody runs.

A wrong call has a `type: ignore` with the code of its error: mypy complains of one that is not needed.
"""

from __future__ import annotations

from pathlib import Path

from typing_extensions import assert_type

import raylaunch
from raylaunch import Handle, Job, RunResult, SpawnContext
from raylaunch.core.job.job import NodeRule, RayOptions


def _train(rate: float, *, steps: int = 3) -> tuple[int, str]:
    return int(rate), str(steps)


def _fork(i: int, path: str) -> None:
    del i, path


def right_calls(nodes: dict[str, NodeRule]) -> None:
    """What a function returns is known; so is which settings there are, and their types."""
    assert_type(raylaunch.launch(_train, (0.1,), {"steps": 2}, nnodes="1:4", max_restarts=3), list[tuple[int, str]])
    assert_type(raylaunch.launch(lambda: 1.5, keep_warm=60, nodes={"10.*": {"nproc_per_node": 2}}), list[float])
    assert_type(raylaunch.launch(script="train.py", args=["--lr", 0.1], nproc_per_node="gpu"), RunResult)
    assert_type(raylaunch.launch(script=Path("train.py"), ray={"address": "none"}), RunResult)
    assert_type(raylaunch.launch(module="package.train", ray=RayOptions(address="none"), nodes=nodes), RunResult)
    assert_type(raylaunch.launch(command="./train", preload=["torch"], hang_timeout="off"), RunResult)
    assert_type(raylaunch.start(_train, (0.1,)), Handle[list[tuple[int, str]]])
    assert_type(raylaunch.start(_train, (0.1,)).result(timeout=3), list[tuple[int, str]])
    assert_type(raylaunch.start(script="train.py", placement="pack").result(), RunResult)
    assert_type(raylaunch.spawn(_fork, ("data",), nprocs=2, join=False, max_restarts=1), SpawnContext)
    raylaunch.spawn(_fork, ("data",), 2)
    assert_type(Job().max_restarts, int)


async def right_await() -> None:
    """A handle can be awaited."""
    assert_type(await raylaunch.start(_train, (0.1,)), list[tuple[int, str]])


def wrong_calls() -> None:
    """A misspelt setting, a wrong type, a wrong word, and arguments that exclude each other."""
    raylaunch.launch(_train, (0.1,), max_restart=3)  # type: ignore[call-overload]
    raylaunch.launch(_train, (0.1,), max_restarts="3")  # type: ignore[call-overload]
    raylaunch.launch(_train, (0.1,), placement="packed")  # type: ignore[call-overload]
    raylaunch.launch(_train, (0.1,), ray={"adress": "none"})  # type: ignore[call-overload]
    raylaunch.launch(_train, 3)  # type: ignore[call-overload]
    raylaunch.launch("train.py")  # type: ignore[call-overload]
    raylaunch.launch(script="train.py", module="train")  # type: ignore[call-overload]
    raylaunch.launch(script="train.py", kwargs={"lr": 1})  # type: ignore[call-overload]
    raylaunch.launch(_train, entrypoint={"script": "train.py"})  # type: ignore[call-overload]
    raylaunch.start(_train, nproc=2)  # type: ignore[call-overload]
    raylaunch.start(_train, (0.1,)).results()  # type: ignore[attr-defined]
    raylaunch.spawn(_fork, ("data",), nproc=2)  # type: ignore[call-overload]
    raylaunch.spawn(wrong_calls, nprocs=2)  # type: ignore[arg-type]
