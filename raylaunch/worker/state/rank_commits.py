"""The commits of one rank in one attempt: what it takes, where that is written, what the ranks agree on and restore."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Protocol, cast

from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.worker.heartbeats import heartbeat_writer, shared_page
from raylaunch.worker.heartbeats.heartbeat_writer import HeartbeatWriter
from raylaunch.worker.state import buffer_client, shared_tensors
from raylaunch.worker.state.buffer_client import BufferClient
from raylaunch.worker.state.checkpoints import checksums
from raylaunch.worker.state.checkpoints.durable_folder import DurableFolder
from raylaunch.worker.state.checkpoints.durable_rounds import DurableRounds
from raylaunch.worker.state.commit_agreement import CommitAgreement, CopyRounds, Proposal
from raylaunch.worker.state.commit_buffer import CommitBuffer
from raylaunch.worker.state.device_copies import DeviceCopies
from raylaunch.worker.state.rank_buffers import RankBuffers
from raylaunch.worker.state.shared_tensors import Digest, IsShared
from raylaunch.worker.state.snapshots import random_states, restored
from raylaunch.worker.state.snapshots.restored import Restored
from raylaunch.worker.state.snapshots.snapshot import OBJECT, Snapshot
from raylaunch.worker.state.snapshots.snapshot_cache import SnapshotCache

if TYPE_CHECKING:
    from raylaunch.worker.state.checkpoints.resharded import Resharded


class _StayingProcess(Protocol):
    """What a process that can stay when others die does in between; see `survivors.survivor`."""

    def announce(self) -> None:
        """All ranks have a commit in common. Called once in each attempt."""

    def leave_if_ordered(self) -> None:
        """Raise an exception before tensors of CUDA are committed, or used for a step, that may be garbage.

        They may be from when NCCL's communicators are aborted: kernels that wait for a rank that is gone end without an
        error then, and what is queued behind them goes on with what they leave.
        """

    def commit_light(self, buffers: RankBuffers, held: HeldCommit, found: Snapshot, interval: int) -> bool:
        """Make a light commit, if that is of use; see `survivors.light_commits`."""

    def live(self, commit: Commit) -> dict[int, Any]:
        """Return the tensors of a light commit that this process has, by their places."""

    def explains(self, error: BaseException) -> bool:
        """Return whether another attempt begins, which may have caused the error."""


survivors: list[_StayingProcess] = []
"""This process, while it can stay when others die: one at most."""


def leave_if_ordered() -> None:
    """Have a process that can stay leave the attempt, if another one begins: see `_StayingProcess`."""
    for survivor in survivors:
        survivor.leave_if_ordered()


_COPY_SECONDS, _FIRST_COPY_SECONDS = 60.0, 10.0
"""How long the last commit before a planned change may take to be copied, if others were copied before, or none was."""
_POLL_SECONDS = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The place of a rank in the world of an attempt."""

    attempt: int
    rank: int
    world_size: int
    local_rank: int
    sharers: range
    """The ranks of its node."""
    nodes: int


class RankRestore:
    """What this rank restores in this attempt."""

    def __init__(
        self,
        place: RankPlace,
        chosen: Commit | None,
        old_size: int,
        client: BufferClient,
        agreement: CommitAgreement,
        folder: DurableFolder | None,
        live: Callable[[Commit], dict[int, Any]],
    ) -> None:
        """`chosen`: the commit that the ranks have chosen, which a world of `old_size` ranks has made.

        `live`: returns the tensors of a light commit that this process has.
        """
        self._place = place
        self._chosen = chosen
        self._old_size = old_size
        self._client = client
        self._agreement = agreement
        self._folder = folder
        self._live = live
        #: How many steps were completed in what was restored.
        self.steps = 0
        #: After how many steps the next commit was to follow there. It is the same on all ranks.
        self.interval = 1

    @property
    def is_forgotten(self) -> bool:
        """Whether there is a commit to restore, and nothing was restored."""
        return self._chosen is not None and not self.steps

    def read(self, tensors: list[Any]) -> Restored | Resharded | None:
        """Return what to restore, for objects that have these parameters; None: there is nothing.

        Raises ValueError where it cannot be restored, and OSError where the folder on disk cannot be read.
        """
        if self._chosen is None:
            return self._read_disk(tensors)
        self.steps = self._chosen.steps
        rank = self._place.rank % self._old_size
        buffer = self._part(rank)
        self.interval = buffer.header.interval
        held = buffer.header.held()
        live = self._live(self._chosen)
        if held is not None and held.light:
            return Restored(buffer, (), [self._part(buffer_client.WHOLE_PART)], live)
        sharing = {one: self._part(one) for one in (held.sharing if held is not None else ())}
        found = Restored(buffer, restored.meshes_of(tensors), sharing.values(), live)
        if self._old_size == self._place.world_size or not found.has_dtensors:
            return found
        if held is None or not held.replicated:
            sharing = {one: self._part(one) for one in range(self._old_size)}
        return cast("Resharded", _resharded().of_parts(sharing | {rank: buffer}, rank, tensors))

    def _read_disk(self, tensors: list[Any]) -> Resharded | None:
        if self._folder is None:
            return None
        path = self._newest_intact(self._folder)
        if not path:
            return None
        self._folder.refuse_strangers(path)
        found, record = _resharded().of_checkpoint(path, self._place.rank, tensors)
        self._old_size, self.steps = record.held.world_size, record.held.commit.steps
        return cast("Resharded", found)

    def _newest_intact(self, folder: DurableFolder) -> str:
        """Return the path of the newest checkpoint that is complete and not damaged; "": there is none.

        Each rank looks at some of its files.
        """
        found = json.loads(self._agreement.agree("checkpoints", lambda: json.dumps(folder.checkpoints())))
        passed_over = []
        for name, is_complete in found:
            path = os.path.join(folder.path, name)
            if is_complete and self._is_intact(path):
                break
            passed_over.append(name)
        else:
            path = ""
        if passed_over and self._place.rank == 0:
            instead = f"restores {os.path.basename(path)}" if path else "begins anew"
            print(
                f"raylaunch: in {folder.path} these are incomplete or damaged: {', '.join(passed_over)}; `State` "
                f"{instead}",
                file=sys.stderr,
                flush=True,
            )
        return path

    def _is_intact(self, path: str) -> bool:
        damaged = checksums.damaged(path, self._place.rank, self._place.world_size)
        if damaged:
            print(f"raylaunch: {path} is damaged: {damaged} is not as it was written", file=sys.stderr, flush=True)
        name = f"damaged/{os.path.basename(path)}"
        return self._agreement.is_same(name, int(damaged != ""), "have not read the checkpoint") and not damaged

    def _part(self, rank: int) -> CommitBuffer:
        found = self._client.part(rank)
        if found is None:
            msg = f"the node does not have the part of rank {rank} of the commit to restore"
            raise ValueError(msg)
        return found

    def restore_random(self, states: dict[str, Any]) -> None:
        """Set the generators to this rank's states, or seed them by another rank's if it had none."""
        if self._place.rank < self._old_size:
            random_states.restore(states)
        else:
            random_states.seed_from(states, self._place.rank)


def _resharded() -> Any:
    """Return the class `Resharded`, whose module imports torch."""
    return import_module("raylaunch.worker.state.checkpoints.resharded").Resharded


class RankSnapshots:
    """Takes this rank's snapshots, and compares what is equal with the other ranks by digests."""

    def __init__(self, rank: int, agreement: CommitAgreement, *, does_share: bool) -> None:
        self._rank = rank
        self._agreement = agreement
        #: Whether the ranks of a node divide among them what is equal on all ranks. If it has one rank, that has all.
        self.does_share = does_share
        self._comparison: Digest | None = None
        #: The digest of the last commit whose tensors are copied; 0: there is nothing to compare.
        self.digest = 0
        #: Takes the snapshots of light commits, with what is known from the last whole one.
        self._cache = SnapshotCache([], {})

    def take(self, objects: Mapping[str, Any], items: dict[str, Any], number: int) -> Snapshot:
        """Take the items of a commit of this number, among them the states of these objects.

        Before the first commit this waits for all ranks, to see whether they have equal tensors to share.
        """
        of_world, shared = self._divided(objects)
        self._cache = SnapshotCache(of_world, shared)
        found = Snapshot(items, of_world, shared)
        self._comparison = None
        if self.does_share:
            is_first = number == 1
            if not is_first or found.shared_bytes >= shared_tensors.LEAST_SHARED_BYTES:
                self._comparison = Digest(found.shared, number, is_full=is_first)
            if is_first and not self._agreement.is_same("tensors", self.find_digest()):
                self._share_no_more()
            self.does_share = self.does_share and self._comparison is not None
        if not self.does_share and found.shared:
            self._comparison, found = None, Snapshot(items, of_world)
        return found

    def take_light(self, items: dict[str, Any]) -> Snapshot:
        """Take the items of a light commit. The last whole one tells what is equal."""
        return self._cache.take(items)

    def moves(self) -> Iterable[tuple[Any, Any]]:
        """Return what `DeviceCopies` is to copy with the snapshot that was taken last: see `Digest.moves`."""
        return self._comparison.moves() if self._comparison is not None else ()

    def find_digest(self) -> int:
        """Return the digest of the snapshot that was taken last, whose tensors are copied; 0: none is compared."""
        self.digest = self._comparison.value() if self._comparison is not None else 0
        return self.digest

    def were_equal(self, number: int) -> bool:
        """Return whether what all ranks have shared in this commit, which they all have, was equal.

        If it was not, nothing is shared from now on.
        """
        if not self.does_share or self._agreement.had_same_digest(number):
            return True
        self._share_no_more()
        return False

    def _share_no_more(self) -> None:
        """Let each rank copy all of its tensors from now on, since tensors that should be equal are not."""
        self.does_share = False
        if self._rank == 0:
            print(
                "raylaunch: parameters that DistributedDataParallel keeps equal, or their optimizer's state, differ "
                "between the ranks; each rank commits its own, which takes more time and memory",
                file=sys.stderr,
                flush=True,
            )

    def _divided(self, objects: Mapping[str, Any]) -> tuple[list[str], dict[str, IsShared]]:
        """Return the names of the items that all ranks have together, and which tensors of an item are equal."""
        of_world = [OBJECT + name for name, one in objects.items() if _is_of_world(one)]
        shared = shared_tensors.find(objects) if self.does_share else {}
        return of_world, {OBJECT + name: is_shared for name, is_shared in shared.items()}


def _is_of_world(found: Any) -> bool:
    """Return whether all ranks have the object's state together: it is a module or an optimizer."""
    return isinstance(found, getattr(sys.modules.get("torch.nn"), "Module", ())) or hasattr(found, "param_groups")


class RankCommits:
    """The commits of this rank in this attempt."""

    def __init__(self) -> None:
        #: The number of the commit that is being made, or was made last; 0: there is none.
        self.number = 0
        self._is_begun = False
        self._is_common = False
        #: Whether all ranks have the first commit of this attempt, and light ones may follow.
        self._has_first = False
        #: Whether there is memory for light commits.
        self._has_room = True
        #: None: commits are not written to disk.
        self._rounds: DurableRounds | None = None

    @property
    def is_restore_forgotten(self) -> bool:
        """Whether the script commits, though it has restored nothing of what there is."""
        return self._is_begun and self.to_restore.is_forgotten

    @property
    def is_over(self) -> bool:
        """Whether this process is in another attempt by now."""
        return self._is_begun and self._place.attempt != _number(heartbeat_writer.ATTEMPT_VARIABLE, 1)

    def find_common(self) -> None:
        """Look whether all ranks have the first commit, if somebody wants to know."""
        if survivors and not self._has_first and self.number and self.agreement.has_all():
            self._has_first = True
            self.tell_common()

    def tell_common(self) -> None:
        """Say that all ranks have a commit in common, once."""
        if not self._is_common:
            self._is_common = True
            for each in survivors:
                each.announce()

    def begin(self, writer: HeartbeatWriter, folder: DurableFolder | None) -> None:
        """Choose with all ranks what to restore, and wait until the node has it. Called again, do nothing.

        `folder`: where commits are also written; None: nowhere.

        Raises RuntimeError if this process has begun another one in this attempt: both would write the same buffers.
        """
        if self._is_begun:
            return
        place = self._place = _place()
        if writer.commits.attempt_with_state == place.attempt:
            msg = "this worker has another `State` already: make one `State` of all objects that are to survive"
            raise RuntimeError(msg)
        if folder is not None:
            folder.check()
        writer.commits.attempt_with_state = place.attempt
        waiting = partial(writer.record_alive, waits=True)
        self.agreement = CommitAgreement(place.rank, place.world_size, waiting)
        has_agent = shared_page.PAGE_VARIABLE in os.environ
        if has_agent and place.local_rank == 0:
            self.agreement.choose_commit(place.attempt, place.nodes)
        chosen, old_size = writer.commits.commit_to_restore(writer.record_alive) or (None, 0)
        client = BufferClient(place.attempt, place.rank)
        if folder is not None:
            ask = buffer_client.ask if has_agent else without_agent().OwnFiles(folder).ask
            client = BufferClient(place.attempt, place.rank, ask, folder=folder.path, keep=folder.keep)
        self.copies = CopyRounds(writer.commits.commit_to_keep(), place.local_rank, place.nodes)
        self.buffers = RankBuffers(
            client,
            place.rank,
            place.sharers,
            spared=chosen,
            copies=self.copies,
            is_durable=folder is not None,
        )
        self.to_restore = RankRestore(place, chosen, old_size, client, self.agreement, folder, _live)
        if folder is not None:
            if place.rank == 0:
                folder.claim(self)
            self._rounds = DurableRounds(folder, place.rank, place.local_rank, monotonic())
        self._is_begun = True
        does_share = has_agent and place.world_size > 1  # the same on all ranks
        self.snapshots = RankSnapshots(place.rank, self.agreement, does_share=does_share)

    @property
    def token(self) -> int:
        """A random number that is the same on all ranks, where something is to be written to disk; else 0."""
        return self._rounds.token(self.agreement) if self._rounds is not None else 0

    def wait_for_all(self, completed: int, *, is_last: bool = False) -> Proposal:
        """Wait until all ranks have the last commit: then the one before it may be overwritten.

        Return what rank 0 has proposed for the next one, after `completed` steps. `is_last`: the workers are stopped
        after it.
        """
        proposal = self.agreement.wait(self.number)
        if not self.snapshots.were_equal(self.number) and (dropped := self.buffers.drop_newest()) is not None:
            self.copies.drop(dropped, self.agreement)
        if self.number == 0:
            # What is restored may have lost its second host, so the first commit is copied at once.
            proposal = replace(proposal, interval=self.to_restore.interval, is_kept=self.copies.kept is not None)
        self.number += 1
        if is_last:
            proposal = replace(proposal, to_disk=False)
        if proposal.is_kept:
            self.copies.begin(Commit(self._place.attempt, completed))
        if self._rounds is not None:
            self._rounds.began(monotonic(), to_disk=proposal.to_disk)
        return proposal

    def write(self, found: Snapshot, *, to_disk: bool) -> DeviceCopies:
        """Write that snapshot into a buffer. Raises as `RankBuffers.write`."""
        return self.buffers.write(found, to_disk=to_disk, moves=self.snapshots.moves())

    def commit_light(self, items: dict[str, Any], completed: int, interval: int) -> bool:
        """Commit what is not equal on all ranks, after `completed` steps. Return False if that is of no use.

        The last whole commit tells what is equal. `interval`: from one whole commit to the next, in steps.
        """
        found = self.snapshots.take_light(items)
        if found.shared_bytes < shared_tensors.LEAST_SHARED_BYTES or found.has_dtensors:
            return False
        is_made = False
        try:
            for each in survivors:
                is_made |= each.commit_light(self.buffers, self._named(completed, found), found, interval)
        except MemoryError as error:
            self._has_room = False
            print(f"raylaunch: there are no light commits: {error}", file=sys.stderr, flush=True)
        return is_made

    @property
    def makes_light(self) -> bool:
        """Whether a light commit can be of use: survivors have what it lacks, and all ranks have a whole commit."""
        return bool(survivors) and self._has_first and self.snapshots.does_share and self._has_room

    def wait_for_copy(self, writer: HeartbeatWriter, completed: int) -> None:
        """Wait until the last commit is copied, before a node goes. If copies fail, soon give up, with a message."""
        node = writer.commits
        if not node.awaits_copy or node.copied_steps() is None:
            return
        seconds = _COPY_SECONDS if node.copied_steps() else _FIRST_COPY_SECONDS
        until = monotonic() + seconds
        while node.copied_steps() != completed and writer.is_save_committed(completed):
            if monotonic() >= until:
                self._say_not_copied(completed, seconds)
                return
            writer.record_alive()
            sleep(_POLL_SECONDS)

    def _say_not_copied(self, completed: int, seconds: float) -> None:
        """Say on the first rank of the node that the last commit has no copy."""
        if not _number("LOCAL_RANK", 0):
            print(
                f"raylaunch: the commit after {completed} steps was not copied to another node within {seconds:g} s, "
                "and is not waited for any more",
                file=sys.stderr,
                flush=True,
            )

    def announce(self, number: int, writer: HeartbeatWriter, intervals: tuple[int, int]) -> None:
        """Say that this rank has a commit whole. `intervals`: what this rank would propose, for light ones too."""
        self.copies.count(writer.commits, self.agreement)
        to_disk = False
        if self._rounds is not None:
            self._rounds.tell(self.buffers, monotonic())
            to_disk = self._rounds.is_due(self.buffers, monotonic())
        is_kept = self._place.rank == 0 and not to_disk and self.copies.is_next_due(writer.commits, self.agreement)
        self.agreement.announce(number, Proposal(intervals[0], to_disk, is_kept, intervals[1]), self.snapshots.digest)

    def identify(self, completed: int, found: Snapshot) -> HeldCommit:
        """Return the name of the commit after `completed` steps, whose tensors are copied."""
        return replace(self._named(completed, found), digest=self.snapshots.find_digest())

    def _named(self, completed: int, found: Snapshot) -> HeldCommit:
        return HeldCommit(
            rank=self._place.rank,
            world_size=self._place.world_size,
            commit=Commit(self._place.attempt, completed),
            replicated=found.is_replicated,
            first_sharer=self._place.sharers.start if found.shared else 0,
            sharers=len(self._place.sharers) if found.shared else 0,
        )


def _place() -> RankPlace:
    """Return this rank's place in the world, as its environment says."""
    rank, local_rank = _number("RANK", 0), _number("LOCAL_RANK", 0)
    first = rank - local_rank
    return RankPlace(
        attempt=_number(heartbeat_writer.ATTEMPT_VARIABLE, 1),
        rank=rank,
        world_size=_number("WORLD_SIZE", 1),
        local_rank=local_rank,
        sharers=range(first, first + _number("LOCAL_WORLD_SIZE", 1)),
        nodes=_number("GROUP_WORLD_SIZE", 1),
    )


def _live(commit: Commit) -> dict[int, Any]:
    """Return the tensors of a light commit that this process has, by their places."""
    return {place: tensor for each in survivors for place, tensor in each.live(commit).items()}


def refuse_survivors() -> None:
    """Raise RuntimeError in an attempt with survivors, whose state differs from a new worker's."""
    if os.environ.get(heartbeat_writer.WITH_SURVIVORS_VARIABLE):
        msg = "there is nothing to restore, though workers of the attempt before have stayed"
        raise RuntimeError(msg)


def without_agent() -> Any:
    """Return the module of this name, which imports torch."""
    return import_module("raylaunch.worker.state.checkpoints.without_agent")


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default
