"""The order of the checks, and what is said of each before and after it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from raylaunch.core import checkup, surroundings
from raylaunch.core.checkup import Outcome, Row, Status
from raylaunch.worker.selfcheck import rendezvous, versions
from raylaunch.worker.selfcheck.attempt import attempt
from raylaunch.worker.selfcheck.bench import Bench, device_of
from raylaunch.worker.selfcheck.collectives import CHECKS
from raylaunch.worker.selfcheck.council import AbsentError, Council
from raylaunch.worker.selfcheck.models import MODELS, speed

FIRST_PATIENCE = 120.0
"""Ranks may come at very different times: each has torch to import."""
_GRACE = 5.0
"""What a check may need beside the waiting that its timeout bounds."""
_MOST_LATE = 3

Check = Callable[[Bench], Any]


@dataclass(slots=True, kw_only=True)
class Course:
    """The whole check, as one rank runs it. Rows are on rank 0 alone."""

    council: Council
    timeout: float
    rows: list[Row] = field(default_factory=list)
    halted: str = ""
    """Why no further group can be made, on any rank."""
    _benches: list[Bench] = field(default_factory=list)
    _at: tuple[str, str] = ("nodes", "all ranks")

    def run(self, backends: Sequence[str] | None, path: str | None) -> None:
        """All rows, in order."""
        self.council.note("comparing the nodes")
        word = asdict(versions.surroundings()), versions.lacks(), versions.gpu()
        _have_nccl_raise()
        chosen = self.council.decide(word, lambda words: self._compare(words, backends), patience=FIRST_PATIENCE)
        shared = rendezvous.find_shared(self.council, path, self.timeout)
        for backend in chosen:
            self._check_backend(backend, shared)

    @property
    def has_leftovers(self) -> bool:
        """Whether something was given up that may still wait."""
        return bool(self.halted) or any(bench.abandoned for bench in self._benches)

    def agree_on(self, code: int) -> int:
        """Rank 0's exit code, on all ranks; rank 0 is the last to get it."""
        code = int(self.council.decide(code, lambda words: words[0], patience=self.timeout))
        self.council.part()
        return code

    def note_absent(self, absent: AbsentError) -> None:
        """The check ends here."""
        self._record(checkup.absent_row(*self._at, absent.where))

    def _compare(self, words: dict[int, Any], asked: Sequence[str] | None) -> list[str]:
        """The rows of the nodes, and the backends that all ranks can use."""
        places = {rank: surroundings.Surroundings(**place) for rank, (place, _, _) in words.items()}
        for rows in (surroundings.node_rows, surroundings.version_rows, surroundings.env_rows):
            self.rows.extend(rows(places))
        names = asked or list(words[0][1])
        return [name for name in names if self._is_usable(name, words, asked=asked is not None)]

    def _is_usable(self, backend: str, words: dict[int, Any], *, asked: bool) -> bool:
        """Whether all ranks have it. That none has it is a fault only where it was asked for by name."""
        outcomes = {rank: _availability(lacks, backend) for rank, (_, lacks, _) in words.items()}
        usable = [outcome.status is Status.OK for outcome in outcomes.values()]
        if not all(usable):
            if any(usable) or asked:
                self._record(checkup.merge(backend, "available", outcomes))
            return False
        shared = _shared([gpu for _, _, gpu in words.values()]) if backend == "nccl" else ""
        if shared:
            self._record(Row(part=backend, name="all checks", status=Status.SKIPPED, lines=(shared,)))
        return not shared

    def _check_backend(self, backend: str, shared: rendezvous.Shared) -> None:
        on = Bench(
            backend=backend,
            rank=self.council.rank,
            size=self.council.size,
            device=device_of(backend),
            timeout=timedelta(seconds=self.timeout),
            store=self.council.store.clone(),
        )
        self._benches.append(on)
        path = f"{shared.prefix}.{backend}"
        with rendezvous.removed_after(path, by_this_rank=on.rank == 0):
            self._check_joining(on, path, shared.why_not)
        self._check_operations(on)

    def _check_operations(self, on: Bench) -> None:
        """All in one group, as long as nothing fails in it; then in another."""
        why_not, late, joined = "", 0, False
        for name, check in (*CHECKS, *MODELS, ("all_reduce speed", speed)):
            if not joined and not why_not and not self.halted:
                joined = self._join(on, "group for the checks", Bench.join_anew, quiet=True)
                why_not = "" if joined else "no group could be made"
            if not joined:
                self._skip(on.backend, name, self.halted or why_not)
                continue
            told = self._row(on, name, check)
            late = late + 1 if told["late"] else 0
            if late == _MOST_LATE:
                why_not = f"{late} checks before it ran into the timeout"
            if why_not or not told["clean"]:
                self._leave(on, failed=True)
                joined = False
        if joined:
            self._leave(on, failed=False)

    def _check_joining(self, on: Bench, path: str, no_path: str) -> None:
        """The three ways into a group, each into one of its own."""
        port = rendezvous.tell_port(self.council, self.timeout)
        ways: tuple[tuple[str, Check], ...] = (
            ("init env://", rendezvous.init_env),
            ("init tcp://", lambda on: rendezvous.init_tcp(on, port)),
            ("init file://", lambda on: rendezvous.init_file(on, path)),
        )
        for name, way in ways:
            why_not = self.halted or (no_path if name == "init file://" else "")
            if why_not:
                self._skip(on.backend, name, why_not)
            elif self._join(on, name, way):
                self._leave(on, failed=False)

    def _join(self, on: Bench, name: str, way: Check, *, quiet: bool = False) -> bool:
        """Make a group. Whoever is stuck in this may make it later, in the place of another, so that ends it all."""
        told = self._row(on, name, way, limit=2 * self.timeout + _GRACE, quiet=quiet)
        if told["stuck"]:
            self.halted = f"a rank is stuck in {name} of {on.backend}"
        elif not told["clean"]:
            self._leave(on, failed=True)
        return bool(told["clean"])

    def _leave(self, on: Bench, *, failed: bool) -> None:
        told = self._row(on, "end of the group", lambda on: on.leave(failed=failed), quiet=True)
        if not told["clean"]:
            self.halted = f"a group of {on.backend} did not end"

    def _row(self, on: Bench, name: str, check: Check, *, limit: float = 0.0, quiet: bool = False) -> dict[str, bool]:
        """Run one check on all ranks; what came of it, in which all ranks agree. Quiet ones only tell of failure."""
        self._at = (on.backend, name)
        self.council.note(f"{on.backend} {name}")
        if not quiet:
            self._say(f"{on.backend}: {name} ...")
        limit = limit or self.timeout + _GRACE
        outcome = attempt(lambda: _on_device(check, on), timeout=self.timeout, limit=limit)

        def judge(words: dict[int, Any]) -> dict[str, bool]:
            outcomes = {rank: Outcome(**{**word, "status": Status(word["status"])}) for rank, word in words.items()}
            row = checkup.merge(on.backend, name, outcomes)
            if not (quiet and row.status is Status.OK):
                self._record(row)
            return {
                "clean": row.status in (Status.OK, Status.INFO, Status.SKIPPED),
                "late": any(one.late for one in outcomes.values()),
                "stuck": any(one.stuck for one in outcomes.values()),
            }

        told: dict[str, bool] = self.council.decide(asdict(outcome), judge, patience=limit)
        return told

    def _skip(self, backend: str, name: str, why: str) -> None:
        self._record(Row(part=backend, name=name, status=Status.SKIPPED, lines=(why,)))

    def _record(self, row: Row) -> None:
        self.rows.append(row)
        for line in (f"{row.part}: {row.name}: {row.result}", *(f"    {detail}" for detail in row.details)):
            self._say(line)

    def _say(self, line: str) -> None:
        if self.council.rank == 0:
            print(line, file=sys.stderr, flush=True)  # progress; stdout is for the table alone


def _on_device(check: Check, on: Bench) -> str:
    """Run the check with the rank's own device as the current one, which each thread has its own of."""
    import torch  # noqa: PLC0415

    if on.device.type != "cpu":
        torch.accelerator.set_device_index(on.device.index)
    text = check(on)
    return text if isinstance(text, str) and on.rank == 0 else ""


def _availability(lacks: dict[str, str], backend: str) -> Outcome:
    lack = lacks.get(backend, "torch knows no such backend")
    return Outcome(status=Status.WRONG, text=lack) if lack else Outcome(status=Status.OK)


def _shared(gpus: list[str]) -> str:
    ranks = [rank for rank, gpu in enumerate(gpus) if gpus.count(gpu) > 1]
    return f"{checkup.ranks_text(ranks)} share GPUs, which NCCL does not take" if ranks else ""


def _have_nccl_raise() -> None:
    """By default NCCL's watchdog ends the process when an operation times out, and the row with it."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
