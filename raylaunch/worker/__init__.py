"""The API for training scripts: `import raylaunch.worker`. No script has to use it.

A script that wants to lose no step when nodes come and go has three lines more:

    import raylaunch.worker
    ...
        if raylaunch.worker.should_checkpoint(step):
            save(step)
            raylaunch.worker.checkpointed(step)

Outside a launch these functions do nothing, and `should_checkpoint` returns False, so the same script runs under
torchrun and plain Python. Importing this package imports nothing but the standard library.

With `State`, a script needs no disk to go on after a failure: the memory of its node keeps what it commits.

In this package, `runtime` runs the user's code in a worker process, `heartbeats` reports its steps to the node, `state`
implements `State`, `survivors` implements `elastic`, and `selfcheck` is the program that `raylaunch check` runs instead
of the script. Read `runtime.boot` first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ContextDecorator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raylaunch.worker.heartbeats import heartbeat_writer
from raylaunch.worker.heartbeats.heartbeat_writer import completed_steps

if TYPE_CHECKING:
    from raylaunch.worker.state.elastic_state import State
    from raylaunch.worker.survivors.elastic_function import elastic
    from raylaunch.worker.survivors.survivor import WorldChanged

__all__ = [
    "Context",
    "Section",
    "State",
    "WorldChanged",
    "checkpointed",
    "context",
    "dataset_shard",
    "elastic",
    "heartbeat",
    "section",
    "should_checkpoint",
]

RUN_DIR_VARIABLE = "RAYLAUNCH_RUN_DIR"
"""In a worker's environment: the run folder. It is not there if no files are kept."""

dataset_shards: Mapping[str, Callable[[], Any]] = {}
"""By the name of a dataset: what returns this rank's part. The rank's `WorkerGroup` sets it in each attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The ranks, the attempt, the restarts and the run folder of this process.

    Under plain Python it is rank 0 of 1; under torchrun, the ranks are those that torchrun set.
    """

    launched: bool
    """Whether raylaunch started this process or one of its ancestors."""
    rank: int
    """RANK."""
    world_size: int
    """WORLD_SIZE."""
    local_rank: int
    """LOCAL_RANK."""
    local_world_size: int
    """LOCAL_WORLD_SIZE: the number of workers on this node."""
    node_rank: int
    """GROUP_RANK: the number of this node among the nodes of the attempt."""
    nnodes: int
    """GROUP_WORLD_SIZE: the number of nodes in the attempt."""
    attempt: int
    """How often the workers were started so far, for whatever reason; 1 at first, 0 outside a launch."""
    restart_count: int
    """How often the workers were restarted because some had failed (TORCHELASTIC_RESTART_COUNT)."""
    max_restarts: int
    """How many such restarts the job allows (TORCHELASTIC_MAX_RESTARTS)."""
    run_id: str
    """TORCHELASTIC_RUN_ID; `""` outside a launch."""
    run_dir: str
    """RAYLAUNCH_RUN_DIR: the run folder, for example for TensorBoard; `""` outside a launch, and without `log_dir`.

    The same on all nodes; where they share no file system, each has a folder of its own there.
    """


def should_checkpoint(step: int) -> bool:
    """Return whether to write a checkpoint now, because the workers are about to be stopped or restarted.

    That is so when nodes join, when a node is drained, and when a person requests it (`raylaunch stop`, `restart`,
    `resize`), but not after a failure.

    Call this on every rank after each step, with the number of the step that was just done. Count steps through all
    epochs and restarts, so that a number never comes twice. The result is True on all ranks after the same step,
    without any communication between them. Then write the checkpoint and call `checkpointed`; until that call, the rank
    does not count as hung. The ranks have ten minutes to save, or `shutdown_timeout` if that is longer; less if a node
    must leave earlier.

    A call takes about a microsecond. Raises TypeError where `step` is no integer, and ValueError where it is negative
    or not below 2**62.
    """
    completed = completed_steps(step)
    writer = heartbeat_writer.current_writer()
    return writer is not None and writer.should_save(completed)


def checkpointed(step: int) -> None:
    """Report that a checkpoint of this step is written, from which training can go on. Call this on every rank.

    If the checkpoint is written in the background, wait for its end before the call. Checkpoints that
    `should_checkpoint` did not ask for may be reported too; then the call returns at once.

    After a checkpoint that `should_checkpoint` asked for, the call does not return: it waits for the SIGTERM that ends
    the worker, so that the rank does no step that would be lost. If the script has a handler for that signal, the
    handler runs. An exception of the handler is raised here; if it returns, this call returns too, and the script
    should end.

    Raises TypeError and ValueError as `should_checkpoint` does.
    """
    completed = completed_steps(step)
    writer = heartbeat_writer.current_writer()
    if writer is not None:
        writer.record_saved(completed)
        if writer.is_save_committed(completed):
            writer.wait_for_stop(completed)


def heartbeat() -> None:
    """Report a step of a loop that calls no optimizer of torch. If the loop calls one, this adds no step.

    Examples are inference, other frameworks, and a `torch.compile` of the whole step. Hangs of such a loop are found
    only after its first heartbeat.
    """
    writer = heartbeat_writer.current_writer()
    if writer is not None:
        writer.record_heartbeat()


class Section(ContextDecorator):
    """What `section` returns: a context manager that is also a decorator."""

    def __enter__(self) -> None:
        writer = heartbeat_writer.current_writer()
        if writer is not None:
            writer.change_open_sections(1)

    def __exit__(self, *_: object) -> None:
        writer = heartbeat_writer.current_writer()
        if writer is not None:
            writer.change_open_sections(-1)


def section(name: str) -> Section:
    """Mark a part of the script that may take long without a step. Inside it, the rank does not count as hung.

        with raylaunch.worker.section("validation"):
            validate()

    The result can also decorate a function. Raises TypeError where the name is missing, as in a bare `@section`.
    """
    if not isinstance(name, str):
        msg = f'`section` takes a name, as in `with section("validation")`; got {name!r}'
        raise TypeError(msg)
    return Section()


def dataset_shard(name: str) -> Any:
    """Return this rank's part of a dataset of its `WorkerGroup`, as a `ray.data.DataIterator`.

        for batch in raylaunch.worker.dataset_shard("train").iter_torch_batches(batch_size=32):
            ...

    All ranks get the same number of rows, and iterate at the same time. Each iteration is an epoch. After a restart or
    a resize, the dataset is split among the new ranks: call this again, and keep no iterator from before.
    The first use connects the process to Ray, which takes a second or two.

    Raises LookupError if the group was given no dataset of this name, and in a process that is no rank of a group.
    """
    if name not in dataset_shards:
        have = ", ".join(map(repr, dataset_shards)) or "none"
        msg = f"this rank has no dataset {name!r}: `datasets` of its `WorkerGroup` has {have}"
        raise LookupError(msg)
    return dataset_shards[name]()


def context() -> Context:
    """Return the ranks, the attempt, the restarts and the run folder, as the environment has them."""
    return Context(
        launched=heartbeat_writer.ATTEMPT_VARIABLE in os.environ,
        rank=_int_from_env("RANK", 0),
        world_size=_int_from_env("WORLD_SIZE", 1),
        local_rank=_int_from_env("LOCAL_RANK", 0),
        local_world_size=_int_from_env("LOCAL_WORLD_SIZE", 1),
        node_rank=_int_from_env("GROUP_RANK", 0),
        nnodes=_int_from_env("GROUP_WORLD_SIZE", 1),
        attempt=_int_from_env(heartbeat_writer.ATTEMPT_VARIABLE, 0),
        restart_count=_int_from_env("TORCHELASTIC_RESTART_COUNT", 0),
        max_restarts=_int_from_env("TORCHELASTIC_MAX_RESTARTS", 0),
        run_id=os.environ.get("TORCHELASTIC_RUN_ID", ""),
        run_dir=os.environ.get(RUN_DIR_VARIABLE, ""),
    )


def __getattr__(name: str) -> Any:
    """Import `State` and `elastic` when they are first used: most scripts do without, and they need more modules."""
    if name == "State":
        from raylaunch.worker.state import elastic_state  # noqa: PLC0415

        elastic_state.let_torch_abort_nothing()
        return elastic_state.State
    if name == "elastic":
        from raylaunch.worker.survivors import elastic_function  # noqa: PLC0415

        elastic_function.watch()  # not at its import, which may be another process's, for workers that it forks
        return elastic_function.elastic
    if name == "WorldChanged":
        from raylaunch.worker.survivors.survivor import WorldChanged  # noqa: PLC0415

        return WorldChanged
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def _int_from_env(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default
