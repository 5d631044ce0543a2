"""What the ranks of a world agree on by the attempt's TCPStore: what to restore, and which commits all of them have.

At the beginning of an attempt, the first rank of each node asks the agent what the node holds, and tells the others.
Rank 0 chooses, and each first rank tells its agent, which gets the parts that the node lacks and then shows the choice
on the shared page (`CommitAgreement.choose_commit`).

A rank has two buffers. It overwrites the older one only when all ranks have the newer one whole, so there is always a
commit that all ranks have. In a script whose ranks wait for each other in collectives, this is so when they come to the
next commit, and costs two messages to the store. Other scripts wait here for their slowest rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from time import monotonic, sleep
from typing import Any

import msgspec

from raylaunch.core.machine.commits import Commit, Holder, choose
from raylaunch.worker.heartbeats.heartbeat_writer import NodeCommits
from raylaunch.worker.state import buffer_client
from raylaunch.worker.state.buffer_client import Request

_PREFIX = "raylaunch/state"
_RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
"""In a worker's environment, with torchrun too, whose store lives longer than an attempt."""
_POLL_SECONDS = (0.0002, 0.01)
"""Between two looks, from the first to the longest."""
_PATIENCE = 30.0
"""Seconds before a waiting rank reports what it is waiting for."""
_STORE_SECONDS = 300.0
_SLOTS = 2
"""Keys are used again for every second commit. When rank 0 writes the keys of commit N, all ranks have read the keys of
N-2, since all have completed N-1."""
_HELD_POLL_SECONDS, _AGAIN_SECONDS = 0.002, 0.05
_AGENT_PATIENCE = 2.0
"""Seconds for which a worker asks its agent that does not know it."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What rank 0 says of the next commit, with the one before it."""

    interval: int = 1
    """After how many steps."""
    to_disk: bool = False
    """Whether it is also to be written to disk."""
    is_kept: bool = False
    """Whether it is to be copied to other hosts, and kept until a newer one is."""
    light_interval: int = 1
    """After how many steps there is a light commit; 0: there are none."""


class CommitAgreement:
    """Counts the ranks that have each commit. Commits of an attempt are numbered 1, 2, 3, ... on all ranks alike."""

    def __init__(self, rank: int, world_size: int, waiting: Callable[[], None]) -> None:
        """`waiting` is called again and again while this waits."""
        self._rank = rank
        self._world_size = world_size
        self._waiting = waiting
        self._store: Any = None
        self._proposed = {0: Proposal()}
        #: What the digests of all commits of a slot add up to, if they were equal on all ranks.
        self._digests = [0] * _SLOTS
        self._prefix = f"{_PREFIX}/{os.environ.get(_RESTARTS_VARIABLE, '')}"

    def announce(self, number: int, proposal: Proposal, digest: int = 0) -> None:
        """Say that this rank has this commit whole. `proposal`: used only on rank 0.

        `digest`: of what is equal on all ranks; 0: there is nothing on any of them.
        """
        if self._world_size == 1:
            self._proposed = {number: proposal}
            return
        store = self._connected()
        if self._rank == 0:
            store.set(
                f"{self._prefix}/proposal/{number % _SLOTS}",
                f"{proposal.interval} {proposal.to_disk:d} {proposal.is_kept:d} {proposal.light_interval}",
            )
        if digest:
            store.add(f"{self._prefix}/digests/{number % _SLOTS}", digest)
            self._digests[number % _SLOTS] += self._world_size * digest
        store.add(f"{self._prefix}/count/{number % _SLOTS}", 1)

    def had_same_digest(self, number: int) -> bool:
        """Return whether all ranks have announced this commit, which they all have, with the same digest.

        Compares the sum of all digests with `world_size` times ours. Unequal digests pass with probability 2**-30.
        """
        if number == 0 or self._world_size == 1 or not self._digests[number % _SLOTS]:
            return True
        total = self._connected().add(f"{self._prefix}/digests/{number % _SLOTS}", 0)
        return bool(total == self._digests[number % _SLOTS])

    def is_same(self, name: str, value: int, what: str = "have not come to their first commit") -> bool:
        """Return whether all ranks give the same number. All must ask, once for each name; this waits for them.

        `what`: as in `_await`.
        """
        if self._world_size == 1:
            return True
        store, key = self._connected(), f"{self._prefix}/same/{name}"
        store.add(key, value)
        store.add(f"{key}/count", 1)
        self._await(f"{key}/count", self._world_size, self._ranks_that(what))
        return bool(store.add(key, 0) == self._world_size * value)

    def agree(self, name: str, value: Callable[[], str]) -> str:
        """Return the same on all ranks: what `value` returns on rank 0. All ranks must ask, once for each name."""
        if self._world_size == 1:
            return value()
        key = f"{self._prefix}/agreed/{name}"
        if self._rank == 0:
            self._connected().set(key, value())
        return str(self._connected().get(key).decode())

    def exchange(self, node: int, nodes: int, word: str, answers: Callable[[list[str]], list[str]]) -> str:
        """Return what rank 0 answers to a node: `answers` makes one for each, of the words of all in their order.

        The first rank of each node must ask, once.
        """
        if nodes == 1:
            return answers([word])[0]
        store, words, answered = self._connected(), f"{self._prefix}/words", f"{self._prefix}/answers"
        what = f"{{missing}} of {nodes} nodes have not come there"
        store.set(f"{words}/{node}", word)
        store.add(words, 1)
        if self._rank == 0:
            self._await(words, nodes, what, "restore")
            found = [store.get(f"{words}/{number}").decode() for number in range(nodes)]
            for number, text in enumerate(answers(found)):
                store.set(f"{answered}/{number}", text)
            store.add(answered, 1)
        self._await(answered, 1, what.format(missing="some"), "restore")
        return str(store.get(f"{answered}/{node}").decode())

    def choose_commit(self, attempt: int, nodes: int) -> None:
        """Choose what to restore with the first ranks of the other nodes, and tell the agent. For such a rank.

        Raises OSError where the agent cannot be reached.
        """
        while not (held := _told(Request(attempt=attempt, rank=self._rank, index=0, asks_held=True))):
            self._waiting()  # survivors, or subreapers of lost nodes, are not done
            sleep(_HELD_POLL_SECONDS)
        node = int(os.environ.get("GROUP_RANK", "0"))
        order = self.exchange(node, nodes, held, lambda words: orders(words, self._world_size))
        _told(Request(attempt=attempt, rank=self._rank, index=0, order=order))

    def has_all(self) -> bool:
        """Return whether all ranks have the first commit, which this rank has made."""
        return self._world_size == 1 or self._connected().add(f"{self._prefix}/count/1", 0) >= self._world_size

    def wait(self, number: int) -> Proposal:
        """Wait until all ranks have this commit, and return what rank 0 proposed with it."""
        if number == 0 or self._world_size == 1:
            return self._proposed.get(number, Proposal())
        wanted = self._world_size * ((number + 1) // _SLOTS)
        self._await(
            f"{self._prefix}/count/{number % _SLOTS}", wanted, self._ranks_that("have not made the commit before")
        )
        store = self._connected()
        words = store.get(f"{self._prefix}/proposal/{number % _SLOTS}").split()
        interval, to_disk, is_kept, light_interval = map(int, words)
        return Proposal(interval, bool(to_disk), bool(is_kept), light_interval)

    def _ranks_that(self, what: str) -> str:
        return f"{{missing}} of {self._world_size} ranks {what}; every rank must commit the same steps"

    def _await(self, key: str, wanted: int, why: str, function: str = "commit") -> None:
        """Wait until a counter has this value. After a while, print `why`, in which `missing` is what it lacks."""
        store = self._connected()
        began, pause, told = monotonic(), _POLL_SECONDS[0], False
        while (having := store.add(key, 0)) < wanted:
            self._waiting()
            sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])
            if not told and monotonic() - began > _PATIENCE:
                told = True
                print(
                    f"raylaunch: rank {self._rank} waits in `State.{function}`, since "
                    f"{why.format(missing=wanted - having)}",
                    file=sys.stderr,
                    flush=True,
                )

    def count_copied(self, nodes: int) -> int:
        """Count `nodes` more that have copied a commit to another host; return how many there are by now."""
        return int(self._connected().add(f"{self._prefix}/copied", nodes))

    def _connected(self) -> Any:
        if self._store is None:
            self._store = import_module("torch.distributed").TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=_STORE_SECONDS),
            )
        return self._store


class CopyRounds:
    """The rounds of an attempt. In each, all ranks mark one commit, and their nodes copy it.

    Rank 0 proposes the next round when all nodes are done with the last one. So when a rank learns of a round, the
    commit of the one before is on two hosts everywhere, and need no longer be kept when this one is, too.
    """

    def __init__(self, kept: Commit | None, local_rank: int, nodes: int) -> None:
        """`kept`: what the ranks keep from earlier attempts."""
        self._local_rank = local_rank
        self._nodes = nodes
        self._rounds = 0
        self._is_counted = True
        #: The commit that is copied everywhere, and the one that is being copied.
        self.kept: Commit | None = kept
        self.copying: Commit | None = None

    def begin(self, commit: Commit) -> None:
        """Begin the next round, with this commit."""
        if self._rounds:
            self.kept = self.copying
        self.copying = commit
        self._rounds += 1
        self._is_counted = False

    def drop(self, commit: Commit, agreement: CommitAgreement) -> None:
        """Give up a commit that is not valid, so that no node copies it. The node counts without a copy of it."""
        if self.copying == commit:
            if self._local_rank == 0 and not self._is_counted:
                self._is_counted = True
                agreement.count_copied(1)
            self.copying = self.kept

    def give_up(self) -> None:
        """Keep nothing any more, since the node has no memory for it."""
        self.kept = self.copying = None

    def count(self, node: NodeCommits, agreement: CommitAgreement) -> None:
        """Count this node, once, when it has copied the round's commit."""
        is_copied = self.copying is not None and node.copied_steps() == self.copying.steps
        if self._local_rank == 0 and is_copied and not self._is_counted:
            self._is_counted = True
            agreement.count_copied(1)

    def is_next_due(self, node: NodeCommits, agreement: CommitAgreement) -> bool:
        """Return, on rank 0, whether another round can begin: all nodes are done with the last one."""
        if node.copied_steps() is None or not self._is_counted:
            return False
        return agreement.count_copied(0) >= self._nodes * self._rounds


def _told(request: Request) -> str:
    """Return what the agent says. If it does not know this worker, a survivor is about to learn of another attempt."""
    give_up_at = monotonic() + _AGENT_PATIENCE
    while True:
        try:
            return buffer_client.ask(request)[1]
        except ConnectionError:
            if monotonic() >= give_up_at:
                raise
            sleep(_AGAIN_SECONDS)


def orders(words: Sequence[str], world_size: int) -> list[str]:
    """Choose on rank 0: return the `RestoreOrder` for each node, as JSON. `words`: what each knows of, as `Holder`."""
    holders = [one for word in words for one in msgspec.json.decode(word, type=tuple[Holder, ...])]
    return [msgspec.json.encode(order).decode() for order in choose(holders, world_size)]
