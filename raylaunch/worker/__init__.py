"""Inside the user's process, from the fork to the first line of the script; and what a script may say and ask there.

A script needs nothing of this. One that wants to lose no step when nodes come and go has three lines more:

    import raylaunch.worker
    ...
        if raylaunch.worker.should_checkpoint(step):
            save(step)
            raylaunch.worker.checkpointed(step)

Standard library only. Outside a launch all of it is harmless: nothing is asked for and nothing is written.
"""

from __future__ import annotations

import operator
import os
from contextlib import ContextDecorator
from dataclasses import dataclass

from raylaunch.worker import attach, parking

__all__ = ["Context", "Section", "checkpointed", "context", "heartbeat", "section", "should_checkpoint"]

_MOST_STEPS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Where this process stands in its launch. Under plain Python: rank 0 of 1; under torchrun: its ranks."""

    launched: bool
    """Whether raylaunch started this process, or one that it descends from."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    """GROUP_RANK: the node's place among the nodes of this attempt."""
    nnodes: int
    """GROUP_WORLD_SIZE."""
    attempt: int
    """Counts every start of the workers, from 1: failures as well as nodes that came and went."""
    restart_count: int
    """How many failures were survived so far."""
    max_restarts: int
    run_id: str
    """`""` outside a launch."""


def should_checkpoint(step: int) -> bool:
    """Whether to write a checkpoint at once, since the workers are about to be restarted, or nodes to come or go.

    To be asked by every rank after each step, with the number of the step that was just done. The answer is True on
    all ranks at the same step, with no communication among them. After it, write the checkpoint and call
    `checkpointed`; in between the rank does not count as hung. From the first question to the last checkpoint there
    are ten minutes (`shutdown_timeout`, if that is longer), or as much of them as a node that must go has left.

    Steps are to be counted through all epochs and restarts, so that no rank is asked for the same one twice.

    Costs about a microsecond. Raises TypeError or ValueError for what is no step.
    """
    done = _steps_done(step)
    watch = attach.present()
    return watch is not None and watch.asks(done)


def checkpointed(step: int) -> None:
    """Say that a checkpoint is written from which training can go on after this step; to be called by every rank.

    Where `should_checkpoint` had asked for it, this does not return: the process waits here to be ended by SIGTERM,
    so that no step is done that would be lost. A handler of the script's own for that signal may raise out of here;
    after one that returns, this returns too, and the script is to end by itself. What is written in the background is
    to be waited for first.

    Checkpoints that nobody asked for may be told as well; then this returns at once.
    """
    done = _steps_done(step)
    watch = attach.present()
    if watch is not None:
        watch.saved(done)
        if watch.is_due(done):
            parking.park(watch, done)


def heartbeat() -> None:
    """A sign of life from a loop in which no optimizer of torch steps: inference, other frameworks, `torch.compile`
    of a whole step. Such a loop is only found to hang once it has given one.
    """
    watch = attach.present()
    if watch is not None:
        watch.mark()


class Section(ContextDecorator):
    """What `section` gives: for `with`, or before a function."""

    def __enter__(self) -> None:
        watch = attach.present()
        if watch is not None:
            watch.section(1)

    def __exit__(self, *_: object) -> None:
        watch = attach.present()
        if watch is not None:
            watch.section(-1)


def section(name: str) -> Section:
    """Mark a part of the script that may take long without a sign of life, and is not to be taken for a hang.

        with raylaunch.worker.section("validation"):
            validate()

    Raises TypeError where the name is missing, as in `@section` before a function.
    """
    if not isinstance(name, str):
        msg = f'`section` takes a name, as in `with section("validation")`; got {name!r}'
        raise TypeError(msg)
    return Section()


def context() -> Context:
    """Ranks, attempt and restarts, as the environment of this process tells them."""
    return Context(
        launched=attach.ATTEMPT in os.environ,
        rank=_number("RANK", 0),
        world_size=_number("WORLD_SIZE", 1),
        local_rank=_number("LOCAL_RANK", 0),
        local_world_size=_number("LOCAL_WORLD_SIZE", 1),
        node_rank=_number("GROUP_RANK", 0),
        nnodes=_number("GROUP_WORLD_SIZE", 1),
        attempt=_number(attach.ATTEMPT, 0),
        restart_count=_number("TORCHELASTIC_RESTART_COUNT", 0),
        max_restarts=_number("TORCHELASTIC_MAX_RESTARTS", 0),
        run_id=os.environ.get("TORCHELASTIC_RUN_ID", ""),
    )


def _steps_done(step: int) -> int:
    """Steps that are done once this one is, which counts from 0."""
    if isinstance(step, bool):
        msg = f"`step` is the number of the step that was just done; got {step!r}"
        raise TypeError(msg)
    try:
        number = operator.index(step)
    except TypeError:
        msg = f"`step` is the number of the step that was just done, an int; got {type(step).__name__} {step!r}"
        raise TypeError(msg) from None
    if not 0 <= number < _MOST_STEPS:
        msg = f"`step` is the number of the step that was just done, from 0 on; got {number}"
        raise ValueError(msg)
    return number + 1


def _number(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else otherwise
