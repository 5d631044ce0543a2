"""`State`: what a script needs to go on after a failure as if nothing had happened. The name is Horovod's."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Literal

from raylaunch.worker.heartbeats import heartbeat_writer, shared_page
from raylaunch.worker.heartbeats.heartbeat_writer import HeartbeatWriter, completed_steps
from raylaunch.worker.state import rank_commits
from raylaunch.worker.state.checkpoints.durable_folder import DurableFolder
from raylaunch.worker.state.device_copies import DeviceCopies
from raylaunch.worker.state.rank_commits import RankCommits, RankRestore
from raylaunch.worker.state.snapshots import random_states
from raylaunch.worker.state.snapshots.restored import Restored
from raylaunch.worker.state.snapshots.snapshot import OBJECT, Snapshot

if TYPE_CHECKING:
    from raylaunch.worker.state.checkpoints.resharded import Resharded

COST_SHARE = 0.02
"""With `every="auto"`: what commits may cost, as a share of the time between them."""
_AIMED_SHARE = 0.9 * COST_SHARE
"""What `auto` aims at."""
_LIGHT_SHARE = 0.65 * COST_SHARE
"""What light commits may cost."""
_LONGEST_LIGHT_INTERVAL = 4
"""Steps: rarer ones are seldom of use. On a CUDA device each waits until the step is done, which may take too long."""
_SHARE_BESIDE_LIGHT = 0.2 * COST_SHARE
"""What other commits cost if a light one follows each step, since few failures need them then."""
_MOST_DEBT = 8
"""Time over budget lengthens later intervals; at most this many commits' worth is carried over."""
_WARM_AFTER = 3
"""Commits of an attempt, the first to be measured included: the two before fill the pages of the two buffers."""
_STEPS_MEASURED = 16
_SOONER = 64
"""The first commit after a restore follows after this part of the interval, so that a script that fails again and again
gets further. Light commits, beside which the interval is longer, begin after it."""
_MOST_GROWTH = 4
"""How many times as long as the last interval the next one may be: the first commit that is measured may be slow by
chance, and a long interval is only found to be wrong at its end."""
_COSTS_AVERAGED = 8
"""Commits in the mean cost: on a busy machine one may take several times as long as the next."""

Every = Literal["auto"] | int
"""How often to commit."""


class CommitSchedule:
    """Decides whether a step is followed by a commit, in the same way on all ranks.

    With `auto`, rank 0 measures and proposes an interval with each commit. All ranks use it from the next commit on,
    before which they have all got it: see `CommitAgreement`.
    """

    def __init__(self, every: Every) -> None:
        """Raise TypeError or ValueError where `every` is neither `auto` nor a number from 1 on."""
        if every != "auto" and (isinstance(every, bool) or not isinstance(every, int)):
            msg = f'`every` is "auto" or a number of steps; got {every!r}'
            raise TypeError(msg)
        if isinstance(every, int) and every < 1:
            msg = f"`every` is a number of steps from 1 on; got {every}"
            raise ValueError(msg)
        self._every = every
        self._next = 0
        #: After how many steps the next commit follows the last one.
        self.interval = 1
        #: After how many steps there is a light commit, if those are of use; 0: there are none.
        self.light_interval = 1
        self._light_costs: deque[float] = deque(maxlen=_STEPS_MEASURED)
        #: Light commits since the last full commit.
        self._light_since = 0
        #: What a light commit has taken in the present call.
        self._light_cost = 0.0
        self._steps: deque[float] = deque(maxlen=_STEPS_MEASURED)
        self._costs: deque[float] = deque(maxlen=_COSTS_AVERAGED)
        #: When the last call of `State.commit` has returned, and when the present one has begun.
        self._called_at: float | None = None
        self._entered_at = 0.0
        #: Seconds of all calls beyond the share that they may have, since costs are measured; None: not yet.
        self._debt: float | None = None

    @property
    def is_automatic(self) -> bool:
        """Whether the ranks have to agree on the interval."""
        return self._every == "auto"

    def is_due(self, completed: int) -> bool:
        """Return whether to commit after this step."""
        return completed >= self._next if isinstance(self._every, str) else completed % self._every == 0

    def restored(self, completed: int, interval: int) -> None:
        """Note what was restored, and the interval that all ranks had agreed on then: it need not be found again."""
        self.interval = interval
        self._next = completed + math.ceil(interval / _SOONER)

    def committed(self, completed: int, interval: int, light_interval: int = 1) -> None:
        """Note a commit, and the intervals that all ranks have agreed on before."""
        self.interval = interval
        self.light_interval = light_interval
        self._next = completed + interval
        if not self._light_since:
            self._light_costs.clear()  # earlier ones say nothing any more
        self._light_since = 0

    def is_light_due(self, completed: int) -> bool:
        """Return whether to make a light commit after this step, if it is of use."""
        return self.is_automatic and self.light_interval > 0 and completed % self.light_interval == 0

    def light_committed(self, cost: float) -> None:
        """Note what a light commit has cost, in seconds."""
        self._light_costs.append(cost)
        self._light_cost = cost
        self._light_since += 1

    # Measuring, on rank 0.

    def step_ended(self, now: float) -> None:
        """Note that the script has done a step: `State.commit` is called. Times are in seconds."""
        if self._called_at is not None:
            self._steps.append(now - self._called_at)
        self._entered_at = now

    def step_begins(self, now: float) -> None:
        """Note that `State.commit` returns, so that the time of the next step begins."""
        if self._debt is not None and self._called_at is not None:
            self._debt += now - self._entered_at - self._light_cost - self._share * (now - self._called_at)
        self._called_at, self._light_cost = now, 0.0

    @property
    def _share(self) -> float:
        """What commits that are not light may cost."""
        if not self._light_costs:
            return _AIMED_SHARE
        if self.light_interval == 1 or not self.step_seconds:
            return _SHARE_BESIDE_LIGHT
        rest = _AIMED_SHARE - self.light_seconds / (max(1, self.light_interval) * self.step_seconds)
        return max(_SHARE_BESIDE_LIGHT, rest)

    @property
    def light_seconds(self) -> float:
        """The median time of the last light commits; 0: there was none."""
        return sorted(self._light_costs)[len(self._light_costs) // 2] if self._light_costs else 0.0

    @property
    def proposed_light_interval(self) -> int:
        """The interval of light commits, in steps, from the next commit on; 0: they cost too much."""
        if len(self._light_costs) < _STEPS_MEASURED or not self.light_interval:
            return self.light_interval
        found = max(1, math.ceil(self.light_seconds / (_LIGHT_SHARE * self.step_seconds)))
        return found if found <= _LONGEST_LIGHT_INTERVAL else 0

    @property
    def step_seconds(self) -> float:
        """The median time of the last steps, without commits; 0 before the second."""
        return sorted(self._steps)[len(self._steps) // 2] if self._steps else 0.0

    def proposed_interval(self, commits: int, cost: float) -> int:
        """Return the interval, in steps, for a commit that costs `cost` seconds. `commits`: made in this attempt.

        It follows the next commit: the interval until that one is known to all ranks already.
        """
        if commits < _WARM_AFTER or not self.step_seconds:
            return self.interval
        self._costs.append(cost)
        mean, earned = sum(self._costs) / len(self._costs), self._share * self.step_seconds
        left = 0.0 if self._debt is None else max(0.0, self._debt) + cost - earned * self.interval
        self._debt = max(0.0, self._debt or 0.0)
        found = max(1, math.ceil((mean + min(max(0.0, left), _MOST_DEBT * mean)) / earned))
        return min(found, _MOST_GROWTH * self.interval)


_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_VALUES, _RANDOM = "values", "random states"
"""Names of a commit's items, besides the objects."""
_MUCH, _TOLD_SECONDS = 4, 60.0
"""The interval of `auto` is printed again after a change by this factor, but not within `_TOLD_SECONDS`: on a busy
machine it often changes.
"""
_STEPS_FALL = (
    "the number of a step that is committed is not above the one before, or not above what was restored: count steps "
    "through all epochs, and begin with the number that `restore` returns"
)
_NOT_RESTORED = (
    "there is a commit to go on from, but the script has not called `State.restore`: it begins anew after each restart"
)
_not_on_disk: dict[str, int] = {}
"""By durable folder: how many steps were done since the last commit that it can get."""


@dataclass(slots=True)
class _Unsealed:
    """A commit whose tensors on devices are still being copied."""

    number: int
    completed: int
    """After how many steps."""
    found: Snapshot
    copies: DeviceCopies
    interval: int
    """After how many steps the next one follows."""
    seconds: float
    """What it has cost so far."""


class State:
    """The state of a rank's training: objects that have `state_dict` and `load_state_dict`, and values by key.

        state = State(model=model, optimizer=optimizer, scheduler=scheduler)
        done = state.restore()
        for step in range(done, total):
            ...
            state.commit(step)
        state.finish()

    `commit` copies everything into memory of the node, where it stays when this process dies, and `restore` reads it
    back in the next attempt. Every rank must have a state of the same objects, and commit after the same steps. Outside
    a launch, both use the `durable` folder alone; without one, and in processes that a worker has started, they do
    nothing.

    Values are set and read as in a dict, `state["epoch"] = 3`. The random states of Python, NumPy, torch and the GPU
    are part of the state, unless `random_state` is False.
    """

    def __init__(
        self,
        *,
        every: Every = "auto",
        random_state: bool = True,
        durable: str | os.PathLike[str] | None = None,
        **objects: Any,
    ) -> None:
        """Take the objects to keep, by name.

        :param every: steps from one commit to the next; "auto": as often as possible in at most 2 % of the time. With
            `elastic` and DistributedDataParallel, "auto" also commits what is a rank's own after each step.
        :param random_state: whether to keep the random states.
        :param durable: a folder for checkpoints on disk; None: the job's `durable`, or the variable RAYLAUNCH_DURABLE.
        :raises TypeError: an object has no `state_dict` or `load_state_dict`.
        :raises ValueError: `every` is wrong.
        """
        for name, found in objects.items():
            if not (hasattr(found, "state_dict") and hasattr(found, "load_state_dict")):
                msg = f'`{name}` has no `state_dict` and `load_state_dict`; `state["{name}"] = ...` takes any value'
                raise TypeError(msg)
            _refuse_fsdp1(name, found)
        self._objects = objects
        self._values: dict[str, Any] = {}
        self._random_state = random_state
        self._every = every
        self._schedule = CommitSchedule(every)
        self._folder = DurableFolder.of(durable, os.environ)
        self._alone: HeartbeatWriter | None = None
        self._rank = RankCommits()
        #: The interval that was told, and when.
        self._told = 0, -math.inf
        self._unsealed: _Unsealed | None = None
        #: After how many steps `commit` was called last, and a whole commit was made last, or restored; 0: none was.
        self._completed = self._committed = 0

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

        Without one in memory, this restores the newest complete checkpoint in the durable folder. 0: there is none, and
        nothing is changed. Call this once, on every rank, after the objects are made and before the first step. Random
        states are set last. Raises ValueError if the commit is of other objects.
        """
        writer = self._writer()
        if writer is None:
            return 0
        self._begin_attempt()
        self._rank.begin(writer, self._folder)
        to_restore: RankRestore = self._rank.to_restore
        found = to_restore.read([*self._tensors()])
        if found is None:
            rank_commits.refuse_survivors()
            return 0
        names = {OBJECT + name for name in self._objects}
        if missing := names ^ {name for name in found.names if name.startswith(OBJECT)}:
            listed = ", ".join(sorted(name.removeprefix(OBJECT) for name in missing))
            msg = f"the commit to restore and this `State` do not have the same objects: {listed}"
            raise ValueError(msg)
        for name, target in self._objects.items():
            _load(target, found, OBJECT + name)
        self._values = found.item(_VALUES)
        if self._random_state and _RANDOM in found.names:
            to_restore.restore_random(found.item(_RANDOM))
        self._rank.tell_common()
        self._schedule.restored(to_restore.steps, to_restore.interval)
        self._completed = self._committed = to_restore.steps
        return to_restore.steps

    def _writer(self) -> HeartbeatWriter | None:
        """Return the writer of heartbeats; None where nothing is to be done.

        Without a launch, there is something to be done only if there is a durable folder.
        """
        found = heartbeat_writer.current_writer()
        if found is None and self._folder is not None and shared_page.PAGE_VARIABLE not in os.environ:
            if self._alone is None:
                self._alone = rank_commits.without_agent().heartbeats()
            return self._alone
        return found

    def commit(self, step: int) -> None:
        """Commit the state after a step, if `every` says so. `step`: the number of the step that was just done.

        Call this on every rank after each step. Steps count through all epochs and attempts, from 0 on. When this
        returns, the commit is whole, except for tensors on GPUs, which are copied until the next call at the latest.

        When nodes join, are drained, or a person requests a restart, all ranks commit after the same step, and the call
        does not return: it waits for the SIGTERM that ends the worker. If the script also calls `should_checkpoint`,
        that function decides where the worker ends.

        Raises TypeError and ValueError as `should_checkpoint` does, MemoryError before the first copy if the node has
        too little memory, and what `state_dict` and `pickle` raise.
        """
        completed = completed_steps(step)
        writer = self._writer()
        if writer is None:
            return
        self._begin_attempt()
        if completed <= self._completed:
            _warn(_STEPS_FALL)
        self._completed = completed
        writer.record_step(completed)
        self._schedule.step_ended(monotonic())
        self._finish(writer)
        is_last = writer.should_end(completed)
        if is_last or self._schedule.is_due(completed):
            self._commit(writer, completed, is_last=is_last)
        elif self._schedule.is_light_due(completed) and self._rank.makes_light:
            began = perf_counter()
            if self._rank.commit_light(self._collect(), completed, self._schedule.interval):
                self._schedule.light_committed(perf_counter() - began)
        if is_last:
            self._finish(writer)
            self._rank.wait_for_copy(writer, completed)
            writer.record_saved(completed)
            writer.wait_for_stop(completed)
        if self._rank.is_restore_forgotten:
            _warn(_NOT_RESTORED)
        self._note_uncommitted()
        self._rank.find_common()
        self._schedule.step_begins(monotonic())

    def finish(self) -> None:
        """Commit the last step, whatever `every` is, unless it is committed already: training is over.

        Call this on every rank after the last `commit`. With a durable folder, this commit is on disk when the run has
        ended. Raises as `commit` does.
        """
        writer = self._writer()
        if writer is None or not self._completed:
            return
        self._finish(writer)
        if self._committed != self._completed:
            self._commit(writer, self._completed, is_last=False)
            self._finish(writer)
        self._note_uncommitted()

    def _note_uncommitted(self) -> None:
        if self._folder is not None:
            _not_on_disk[self._folder.path] = self._completed - self._committed

    def _begin_attempt(self) -> None:
        """In a survivor: begin anew with what belongs to an attempt."""
        if not self._rank.is_over:
            return
        unsealed, self._unsealed = self._unsealed, None
        if unsealed is not None:
            unsealed.copies.finish()  # into a buffer that is about to be written again
        self._rank, self._schedule = RankCommits(), CommitSchedule(self._every)
        self._completed = self._committed = 0
        for tensor in self._tensors():
            tensor.grad = None  # of a step that was broken off

    def _commit(self, writer: HeartbeatWriter, completed: int, *, is_last: bool) -> None:
        self._rank.begin(writer, self._folder)
        proposal = self._rank.wait_for_all(completed, is_last=is_last)
        began = perf_counter()
        found = self._rank.snapshots.take(self._objects, self._collect(), self._rank.number)
        copies = self._rank.write(found, to_disk=proposal.to_disk)
        self._schedule.committed(completed, proposal.interval, proposal.light_interval)
        seconds = perf_counter() - began
        self._unsealed = _Unsealed(self._rank.number, completed, found, copies, proposal.interval, seconds)
        if not copies.is_running:
            self._finish(writer)

    def _finish(self, writer: HeartbeatWriter) -> None:
        """Seal the last commit, when everything of it is copied."""
        unsealed, self._unsealed = self._unsealed, None
        if unsealed is None:
            return
        seconds = unsealed.copies.finish()  # a wait for the device, besides, which commits have not caused
        began = perf_counter()
        if unsealed.copies.is_running:
            rank_commits.leave_if_ordered()
        held = self._rank.identify(unsealed.completed, unsealed.found)
        self._committed = unsealed.completed
        self._rank.buffers.seal(held, unsealed.found, self._rank.token, unsealed.interval)
        cost = unsealed.seconds + seconds + perf_counter() - began
        proposed = self._schedule.proposed_interval(unsealed.number, cost)
        self._rank.announce(unsealed.number, writer, (proposed, self._schedule.proposed_light_interval))
        writer.record_committed(unsealed.completed, cost)
        self._tell(held.rank, proposed, cost, writer)

    def _tell(self, rank: int, interval: int, cost: float, writer: HeartbeatWriter) -> None:
        """Say on rank 0 how often `auto` commits, and why; on stderr again only where that changes much."""
        (known, at), now = self._told, monotonic()
        is_measured = self._schedule.is_automatic and self._rank.number > 2 and self._schedule.step_seconds  # noqa: PLR2004
        if not is_measured or rank:
            return
        writer.record_commit_rate(interval, self._schedule.step_seconds)
        if known / _MUCH < interval < _MUCH * known or now - at < _TOLD_SECONDS:
            return
        self._told = interval, now
        light, seconds = self._schedule.light_interval, self._schedule.light_seconds
        more = f"; {_often(light)} it commits only what differs between the ranks, in {1000 * seconds:.1f} ms"
        print(
            f"raylaunch: `State` commits {_often(interval)} for now: a commit takes {1000 * cost:.1f} ms, a step "
            f"{1000 * self._schedule.step_seconds:.1f} ms, and commits may take {COST_SHARE:.0%} of the time"
            f"{more if light and seconds else ''}",
            file=sys.stderr,
            flush=True,
        )

    def _collect(self) -> dict[str, Any]:
        items = {OBJECT + name: found.state_dict() for name, found in self._objects.items()}
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


def let_torch_abort_nothing() -> None:
    """Let torch end this process after an error of NCCL, and abort nothing before: see `rank_commits.survivors`.

    It has effect for groups that are made later. torchrun and raylaunch set 1 (TearDown), torch's own default is 3
    (SkipCleanUp); see ProcessGroupNCCL.hpp.
    """
    if os.environ.get(_ERROR_HANDLING) == "1":
        os.environ[_ERROR_HANDLING] = "3"


def uncommitted() -> str:
    """Return what a durable folder lacks if the script ends now, on rank 0, for a person; "": nothing.

    The script may have changed its model since, as one that puts averaged weights into it: no commit can be made here.
    """
    for folder, steps in _not_on_disk.items():
        if steps > 0 and os.environ.get("RANK", "0") == "0":
            what = "the last step is" if steps == 1 else f"the last {steps} steps are"
            return f"{what} in no commit, and not in {folder}: call `finish` of `State` when training is over"
    return ""


def _warn(text: str) -> None:
    """Warn of the line that has called a method of `State`, once, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(text, stacklevel=3)


def _often(interval: int) -> str:
    return "each step" if interval == 1 else f"every {interval} steps"


def _load(target: Any, found: Restored | Resharded, name: str) -> None:
    """Load an object's state. A module's tensors are copied into its own; other objects take the tensors over.

    An optimizer of a survivor gives up its own before, so that a device needs no room for both.
    """
    if hasattr(target, "param_groups") and isinstance(getattr(target, "state", None), dict):
        target.state.clear()
    module = getattr(sys.modules.get("torch.nn"), "Module", ())
    if not isinstance(target, module) or any(key.endswith("_extra_state") for key in target.state_dict()):
        target.load_state_dict(found.item(name))
        return
    state, own = found.item(name, copied=False), target.state_dict()
    is_strict = True
    for key, tensor in [*state.items()] if state.keys() == own.keys() else ():
        if found.is_live(tensor) and tensor.data_ptr() == own[key].data_ptr():
            del state[key]  # in a survivor it is as it was committed
            is_strict = False
    target.load_state_dict(state, strict=is_strict)
    if found.is_aliased([*target.parameters(), *target.buffers()]):  # its class loads tensors in a way of its own
        target.load_state_dict(found.item(name))


def _refuse_fsdp1(name: str, found: Any) -> None:
    module = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if module is not None and hasattr(found, "modules") and any(isinstance(one, module) for one in found.modules()):
        msg = f"`{name}` is wrapped in FullyShardedDataParallel, which `State` does not know; it knows `fully_shard`"
        raise TypeError(msg)
