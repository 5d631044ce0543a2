"""What one rank restores in one attempt: its part of a commit that the nodes have, or a checkpoint on disk."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from raylaunch.core.machine.commits import Commit
from raylaunch.worker.state import buffer_client
from raylaunch.worker.state.checkpoints import checksums
from raylaunch.worker.state.checkpoints.durable_folder import DurableFolder
from raylaunch.worker.state.commit_agreement import CommitAgreement
from raylaunch.worker.state.commit_buffer import CommitBuffer
from raylaunch.worker.state.rank_buffers import RankBuffers
from raylaunch.worker.state.snapshots import random_states, restored
from raylaunch.worker.state.snapshots.restored import Restored

if TYPE_CHECKING:
    from raylaunch.worker.state.checkpoints.resharded import Resharded


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
        buffers: RankBuffers,
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
        self._buffers = buffers
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
        found = self._buffers.part_to_restore(rank)
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
