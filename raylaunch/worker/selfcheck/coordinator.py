"""How the ranks agree on results: through the launch's store, never through the process group under test."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

_MARGIN = 10.0
"""Seconds that a rank may be later than the others before it counts as absent."""


class AbsentError(Exception):
    """Some ranks did not arrive, so nothing more can be checked. Raised on all ranks that did arrive."""

    def __init__(self, where: dict[int, str]) -> None:
        """`where` is the last known position of each absent rank."""
        super().__init__(f"ranks {sorted(where)} did not arrive")
        self.where = where


class SilentError(Exception):
    """Rank 0 did not decide in time."""


class Coordinator:
    """One rank's part in decisions: every rank brings a value, rank 0 decides, every rank gets the decision.

    Values and decisions are JSON. `margin`: seconds that a rank may be later than the others.
    """

    def __init__(self, store: Any, rank: int, size: int, margin: float = _MARGIN) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self._margin = margin
        self._rounds = 0
        self._position = "the beginning"

    def set_position(self, position: str) -> None:
        """Publish what this rank is about to do, for the report in case that it does not arrive."""
        self._position = position
        self.store.set(f"at/{self.rank}", position)

    def decide(self, value: Any, judge: Callable[[dict[int, Any]], Any], *, timeout: float) -> Any:
        """Bring this rank's value; return what `judge` made of all values by rank, on rank 0.

        `timeout`: for how many seconds the ranks may have worked on their own before. Raises AbsentError where a rank
        does not arrive, and SilentError where rank 0 does not decide.
        """
        self._rounds += 1
        self.store.set(self._value_key(self.rank), json.dumps(value))
        if self.rank == 0:
            absent = self._absent(timeout + self._margin)
            decision = None if absent else judge(dict(enumerate(self._values())))
            self.store.set(self._decision_key, json.dumps({"absent": absent, "decision": decision}))
        else:
            self._wait_for_decision(timeout + 2 * self._margin)
        found = json.loads(self.store.get(self._decision_key))
        if found["absent"]:
            raise AbsentError({int(rank): where for rank, where in found["absent"].items()})
        return found["decision"]

    def leave(self) -> None:
        """Stop using the store. Rank 0 returns last, because the store may be served by its process."""
        self.store.set(f"gone/{self.rank}", "")
        if self.rank == 0:
            deadline = time.monotonic() + self._margin
            while time.monotonic() < deadline and not self.store.check([f"gone/{rank}" for rank in range(self.size)]):
                time.sleep(0.01)

    def wait_until_absent_are_reported(self) -> None:
        """Return once rank 0 has reported the absent ranks: when a rank exits, a launcher may kill rank 0."""
        import torch.distributed as dist  # noqa: PLC0415

        if self.rank == 0:
            self.store.set("reported", "")
        else:
            with contextlib.suppress(dist.DistError):
                self.store.wait(["reported"], timedelta(seconds=self._margin))

    @property
    def _decision_key(self) -> str:
        return f"{self._rounds}/decision"

    def _value_key(self, rank: int) -> str:
        return f"{self._rounds}/value/{rank}"

    def _absent(self, seconds: float) -> dict[int, str]:
        """Return the ranks whose value does not come in time, each with its last known position."""
        import torch.distributed as dist  # noqa: PLC0415

        keys = [self._value_key(rank) for rank in range(self.size)]
        try:
            self.store.wait(keys, timedelta(seconds=seconds))
        except dist.DistStoreError:
            return {rank: self._position_of(rank) for rank, key in enumerate(keys) if not self.store.check([key])}
        return {}

    def _position_of(self, rank: int) -> str:
        key = f"at/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else "nothing: it did not begin"

    def _values(self) -> Iterator[Any]:
        for value in self.store.multi_get([self._value_key(rank) for rank in range(self.size)]):
            yield json.loads(value)

    def _wait_for_decision(self, seconds: float) -> None:
        import torch.distributed as dist  # noqa: PLC0415

        try:
            self.store.wait([self._decision_key], timedelta(seconds=seconds))
        except dist.DistError as error:
            msg = f"rank 0 was not heard of for {seconds:.0f} s; this rank is in `{self._position}`"
            raise SilentError(msg) from error
