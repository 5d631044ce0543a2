"""`State`: what a script must have to go on after a failure as if nothing had happened. The name is Horovod's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any

from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.worker.heartbeats import slot_owner
from raylaunch.worker.heartbeats.heartbeat_writer import HeartbeatWriter, completed_steps
from raylaunch.worker.state import random_states, snapshot
from raylaunch.worker.state.commit_agreement import CommitAgreement
from raylaunch.worker.state.commit_schedule import COST_SHARE, CommitSchedule, Every
from raylaunch.worker.state.cuda_copies import CudaCopies
from raylaunch.worker.state.rank_buffers import RankBuffers
from raylaunch.worker.state.snapshot import Restored, Snapshot

_OBJECT, _VALUES, _RANDOM = "object:", "values", "random states"
"""Names of the items of a commit: each object's own behind the first."""


@dataclass(slots=True)
class _Unsealed:
    """A commit whose CUDA tensors are still being copied."""

    number: int
    held: HeldCommit
    found: Snapshot
    copies: CudaCopies
    seconds: float
    """What it has cost so far."""


class State:
    """The state of a rank's training: objects that have `state_dict` and `load_state_dict`, and values by key.

        state = State(model=model, optimizer=optimizer, scheduler=scheduler)
        done = state.restore()
        for step in range(done, total):
            ...
            state.commit(step)

    `commit` copies everything into memory of the node, where it stays when this process dies, and `restore` reads it
    back in the next attempt. Every rank must have a state of the same objects, and commit after the same steps. Outside
    a launch, and in processes that a worker has started, both do nothing.

    Values are set and read as in a dict, `state["epoch"] = 3`. The random states of Python, NumPy, torch and CUDA are
    part of the state, unless `random_state` is False.
    """

    def __init__(self, *, every: Every = "auto", random_state: bool = True, **objects: Any) -> None:
        """`every`: commit after each so many steps; `auto`: as often as costs 2 % of the time at most.

        Raises TypeError where an object has no `state_dict` or `load_state_dict`, and ValueError for a wrong `every`.
        """
        for name, found in objects.items():
            if not (hasattr(found, "state_dict") and hasattr(found, "load_state_dict")):
                msg = f'`{name}` has no `state_dict` and `load_state_dict`; `state["{name}"] = ...` takes any value'
                raise TypeError(msg)
            _refuse_fsdp1(name, found)
        self._objects = objects
        self._values: dict[str, Any] = {}
        self._random_state = random_state
        self._schedule = CommitSchedule(every)
        self._rank = _RankCommits()
        self._told_interval = 0
        self._unsealed: _Unsealed | None = None

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a value, which must be possible to pickle when it is committed."""
        self._values[key] = value

    def __getitem__(self, key: str) -> Any:
        """Return a value: the one that was set or, after `restore`, committed. Raises KeyError where there is none."""
        return self._values[key]

    def __contains__(self, key: str) -> bool:
        """Return whether there is a value with this key."""
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or the default where there is none."""
        return self._values.get(key, default)

    def restore(self) -> int:
        """Set everything to the newest commit that all ranks have, and return how many steps were completed in it.

        0: there is none, and nothing is changed. Call this once, on every rank, after the objects are made and before
        the first step. Random states are set last. Raises ValueError where the commit is of other objects.
        """
        writer = slot_owner.current_writer()
        if writer is None:
            return 0
        restored = self._rank.begin(writer)
        buffer = self._rank.buffers.holding(restored) if restored is not None else None
        if restored is None or buffer is None:
            return 0
        found = Restored(buffer, snapshot.meshes_of(self._tensors()))
        names = {_OBJECT + name for name in self._objects}
        if missing := names ^ {name for name in found.names if name.startswith(_OBJECT)}:
            listed = ", ".join(sorted(name.removeprefix(_OBJECT) for name in missing))
            msg = f"the commit to restore and this `State` do not have the same objects: {listed}"
            raise ValueError(msg)
        for name, target in self._objects.items():
            _load(target, found, _OBJECT + name)
        self._values = found.item(_VALUES)
        if self._random_state and _RANDOM in found.names:
            random_states.restore(found.item(_RANDOM))
        return restored.steps

    def commit(self, step: int) -> None:
        """Commit the state after a step, if it is its turn: see `every`. `step`: the number of the step just done.

        Call this on every rank after each step. Steps count through all epochs and attempts, from 0 on. When this
        returns, the commit is whole, except for CUDA tensors, which are copied until the next call at the latest.

        Raises TypeError and ValueError as `should_checkpoint` does, MemoryError before the first copy where the node
        does not have so much memory, and what `state_dict` and `pickle` raise.
        """
        completed = completed_steps(step)
        writer = slot_owner.current_writer()
        if writer is None:
            return
        writer.record_step(completed)
        self._schedule.step_ended(monotonic())
        self._finish(writer)
        if self._schedule.is_due(completed):
            self._commit(writer, completed)
        self._schedule.step_begins(monotonic())

    def _commit(self, writer: HeartbeatWriter, completed: int) -> None:
        self._rank.begin(writer)
        interval = self._rank.wait_for_all()
        began = perf_counter()
        found = Snapshot(self._collect())
        copies = self._rank.write(found)
        held = self._rank.identify(completed)
        self._schedule.committed(completed, interval)
        self._unsealed = _Unsealed(self._rank.number, held, found, copies, perf_counter() - began)
        if not copies.is_running:
            self._finish(writer)

    def _finish(self, writer: HeartbeatWriter) -> None:
        """Seal the last commit, when everything of it is copied."""
        unsealed, self._unsealed = self._unsealed, None
        if unsealed is None:
            return
        began = perf_counter()
        seconds = unsealed.copies.finish()
        self._rank.seal(unsealed.held, unsealed.found)
        cost = unsealed.seconds + seconds + perf_counter() - began
        proposed = self._schedule.proposed_interval(unsealed.number, cost)
        self._rank.agreement.announce(unsealed.number, proposed)
        writer.record_committed(unsealed.held.commit.steps)
        self._tell(unsealed, proposed, cost)

    def _tell(self, unsealed: _Unsealed, interval: int, cost: float) -> None:
        """Say on rank 0 how often `auto` commits, and why; again only where that changes much."""
        known = self._told_interval
        is_measured = self._schedule.is_automatic and unsealed.number > 2 and self._schedule.step_seconds  # noqa: PLR2004
        if not is_measured or unsealed.held.rank or known / 2 < interval < 2 * known:
            return
        self._told_interval = interval
        often = "each step" if interval == 1 else f"every {interval} steps"
        print(
            f"raylaunch: `State` commits {often}: a commit takes {1000 * cost:.1f} ms, a step "
            f"{1000 * self._schedule.step_seconds:.1f} ms, and commits may take {COST_SHARE:.0%} of the time",
            file=sys.stderr,
            flush=True,
        )

    def _collect(self) -> dict[str, Any]:
        items = {_OBJECT + name: found.state_dict() for name, found in self._objects.items()}
        items[_VALUES] = self._values
        if self._random_state:
            items[_RANDOM] = random_states.collect()
        return items

    def _tensors(self) -> Iterator[Any]:
        """Yield the parameters of all objects that have some, for their meshes."""
        for found in self._objects.values():
            if hasattr(found, "parameters"):
                yield from found.parameters()
            for group in getattr(found, "param_groups", ()):
                yield from group["params"]


class _RankCommits:
    """The commits of this rank in this attempt."""

    def __init__(self) -> None:
        #: The number of the commit that is being made, or was made last; 0: there is none.
        self.number = 0
        self._is_begun = False
        self._chosen: Commit | None = None

    def begin(self, writer: HeartbeatWriter) -> Commit | None:
        """Return what to restore, once the driver has chosen; called again, the same."""
        if not self._is_begun:
            rank, self._world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
            self._attempt = _number(slot_owner.ATTEMPT_VARIABLE, 1)
            self._chosen = writer.commit_to_restore()
            self.buffers = RankBuffers(self._attempt, rank, _number("LOCAL_WORLD_SIZE", 1), spared=self._chosen)
            self.agreement = CommitAgreement(rank, self._world_size, writer.record_alive)
            self._rank, self._is_begun = rank, True
        return self._chosen

    def wait_for_all(self) -> int:
        """Wait until all ranks have the last commit: then the one before it may be overwritten. Return the interval."""
        interval = self.agreement.wait(self.number)
        self.number += 1
        return interval

    def identify(self, completed: int) -> HeldCommit:
        """Return the name of the commit after so many steps."""
        return HeldCommit(rank=self._rank, world_size=self._world_size, commit=Commit(self._attempt, completed))

    def write(self, found: Snapshot) -> CudaCopies:
        """Write a snapshot into the older buffer, without CUDA tensors, which are being copied."""
        return self.buffers.write(found)

    def seal(self, held: HeldCommit, found: Snapshot) -> None:
        """Make what was written count."""
        self.buffers.seal(held, found)


def _load(target: Any, found: Restored, name: str) -> None:
    """Load an object's state. The tensors of a module are copied into its own, those of others become their own."""
    module = getattr(sys.modules.get("torch.nn"), "Module", ())
    if not isinstance(target, module) or any(key.endswith("_extra_state") for key in target.state_dict()):
        target.load_state_dict(found.item(name))
        return
    target.load_state_dict(found.item(name, copied=False))
    if found.is_aliased([*target.parameters(), *target.buffers()]):  # its class loads tensors in a way of its own
        target.load_state_dict(found.item(name))


def _refuse_fsdp1(name: str, found: Any) -> None:
    module = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if module is not None and hasattr(found, "modules") and any(isinstance(one, module) for one in found.modules()):
        msg = f"`{name}` is wrapped in FullyShardedDataParallel, which `State` does not know; it knows `fully_shard`"
        raise TypeError(msg)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default
