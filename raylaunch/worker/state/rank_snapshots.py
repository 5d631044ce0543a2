"""Takes what one rank commits in one attempt: of what is equal on all ranks, its share, as long as it is equal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from raylaunch.worker.state import shared_tensors
from raylaunch.worker.state.commit_agreement import CommitAgreement
from raylaunch.worker.state.shared_tensors import Digest, IsShared
from raylaunch.worker.state.snapshots.snapshot import OBJECT, Snapshot
from raylaunch.worker.state.snapshots.snapshot_cache import SnapshotCache


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
