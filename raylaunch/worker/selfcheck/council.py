"""How the ranks agree on what they met: through the launch's store, never through the group under test."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

_MARGIN = 10.0
"""How much later than the others a rank may be before it counts as absent."""


class AbsentError(Exception):
    """Ranks did not come, so nothing more can be checked. Rank 0 tells it to those that did."""

    def __init__(self, where: dict[int, str]) -> None:
        super().__init__(f"ranks {sorted(where)} did not arrive")
        self.where = where


class SilentError(Exception):
    """Rank 0 gave no decision."""


class Council:
    """All ranks bring a word, rank 0 makes a decision of them, all get it. Words and decisions are JSON."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self._meetings = 0
        self._where = "the beginning"

    def note(self, where: str) -> None:
        """Say where this rank is, for the others to read if it is missed."""
        self._where = where
        self.store.set(f"at/{self.rank}", where)

    def decide(self, word: Any, judge: Callable[[dict[int, Any]], Any], *, patience: float) -> Any:
        """Bring `word`; rank 0 judges the words of all. `patience` is how long this rank may have been on its own."""
        self._meetings += 1
        self.store.set(self._word(self.rank), json.dumps(word))
        if self.rank == 0:
            absent = self._absent(patience + _MARGIN)
            decision = None if absent else judge(dict(enumerate(self._words())))
            self.store.set(self._decision, json.dumps({"absent": absent, "decision": decision}))
        else:
            self._await_decision(patience + 2 * _MARGIN)
        told = json.loads(self.store.get(self._decision))
        if told["absent"]:
            raise AbsentError({int(rank): where for rank, where in told["absent"].items()})
        return told["decision"]

    def part(self) -> None:
        """Let rank 0 be the last to go: the store may live in it."""
        self.store.set(f"gone/{self.rank}", "")
        if self.rank == 0:
            deadline = time.monotonic() + _MARGIN
            while time.monotonic() < deadline and not self.store.check([f"gone/{rank}" for rank in range(self.size)]):
                time.sleep(0.01)

    def dissolve(self) -> None:
        """Where some are absent, let rank 0 say so before the others end, at whose end a launcher ends rank 0 too."""
        import torch.distributed as dist  # noqa: PLC0415

        if self.rank == 0:
            self.store.set("dissolved", "")
        else:
            with contextlib.suppress(dist.DistError):
                self.store.wait(["dissolved"], timedelta(seconds=_MARGIN))

    @property
    def _decision(self) -> str:
        return f"{self._meetings}/decision"

    def _word(self, rank: int) -> str:
        return f"{self._meetings}/word/{rank}"

    def _absent(self, seconds: float) -> dict[int, str]:
        """Those whose word does not come in time, each with where it was heard of last."""
        import torch.distributed as dist  # noqa: PLC0415

        words = [self._word(rank) for rank in range(self.size)]
        try:
            self.store.wait(words, timedelta(seconds=seconds))
        except dist.DistStoreError:
            return {rank: self._last_heard(rank) for rank, word in enumerate(words) if not self.store.check([word])}
        return {}

    def _last_heard(self, rank: int) -> str:
        key = f"at/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else "nothing: it did not begin"

    def _words(self) -> Iterator[Any]:
        for word in self.store.multi_get([self._word(rank) for rank in range(self.size)]):
            yield json.loads(word)

    def _await_decision(self, seconds: float) -> None:
        import torch.distributed as dist  # noqa: PLC0415

        try:
            self.store.wait([self._decision], timedelta(seconds=seconds))
        except dist.DistError as error:
            msg = f"rank 0 was not heard of for {seconds:.0f} s; this rank is in `{self._where}`"
            raise SilentError(msg) from error
