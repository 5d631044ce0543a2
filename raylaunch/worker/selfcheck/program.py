"""The self-check's command line, its course on one rank, its output, and its exit code. Imports torch only to run."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib import import_module
from typing import Any, NoReturn

from raylaunch.worker import torch_internals
from raylaunch.worker.selfcheck import findings, versions
from raylaunch.worker.selfcheck.findings import CheckOutcome, CheckRow, CheckStatus

_FIRST_TIMEOUT = 120.0
"""Seconds that ranks may start apart from each other: each of them imports torch first."""
_MARGIN = 10.0
"""Seconds that a rank may be later than the others before it counts as absent."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the self-check, and return its exit code, which is the same on all ranks: 0 if nothing is wrong."""
    options = _parser().parse_args(argv)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return _error("RANK or WORLD_SIZE is not set: no launcher started this", "run it by `raylaunch check`", code=2)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist = _import_torch()
    if rank == 0:
        print(f"waiting for all {size} ranks ..." if size > 1 else "one rank", file=sys.stderr, flush=True)
    try:
        # The store that `init_process_group()` would use.
        store, _, _ = next(
            dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=max(options.timeout, _FIRST_TIMEOUT)))
        )
    except Exception as error:  # noqa: BLE001
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return _error(f"rank {rank} cannot use the store at {where}: {error}", "look for a firewall between the nodes")
    check = SelfCheck(store=dist.PrefixStore("selfcheck", store), rank=rank, size=size, timeout=options.timeout)
    try:
        check.run(options.backends)
        code = check.leave(report(check, options.json))
    except dist.DistError as error:
        _error(f"rank {rank}: rank 0 was not heard of: {error}", "look at rank 0's output and at its node")
        _exit_now(1)
    if check.broken or check.absent:
        _exit_now(code)
    return code


def _import_torch() -> Any:
    """Import what the checks need, so that no check's time includes it, and hide torch's FutureWarnings."""
    import_module(torch_internals.COMPILER)
    import torch.distributed as dist  # noqa: PLC0415

    import raylaunch.worker.selfcheck.checks  # noqa: F401, PLC0415

    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    return dist


class AbsentError(Exception):
    """Some ranks did not arrive, so nothing more can be checked. Raised on all ranks that did arrive."""


@dataclass(slots=True, kw_only=True)
class SelfCheck:
    """The whole self-check, as one rank runs it. Only rank 0 has rows of a check that ran.

    No operation is interrupted. Where a rank does not come back from one, rank 0 says so after `timeout` and ends the
    check, and the rank itself prints its stack.
    """

    store: Any
    """The launch's store, by which the ranks agree: never by the process group under test."""
    rank: int
    size: int
    timeout: float
    """Seconds that an operation may wait for other ranks."""
    rows: list[CheckRow] = field(default_factory=list)
    broken: str = ""
    """The check that failed so that no process group can be used any more, on any rank."""
    absent: list[int] = field(default_factory=list)
    """The ranks that did not arrive."""
    _decisions: int = 0
    _position: tuple[str, str] = ("nodes", "all ranks")

    def run(self, backends: Sequence[str] | None) -> None:
        """Run all checks with these backends, or with all that work here. Raises torch's DistError without rank 0."""
        try:
            self._run(backends)
        except AbsentError:
            self._record(findings.absent_row(*self._position, self.absent))

    def _run(self, backends: Sequence[str] | None) -> None:
        own = asdict(versions.rank_environment()), versions.backend_problems(), versions.gpu_id()
        _make_nccl_raise()
        usable = self.decide(own, lambda values: self._compare(values, backends), timeout=_FIRST_TIMEOUT)
        for backend in usable:
            if self.broken:
                why = f"{self.broken} failed; check this alone with `--backends {backend}`"
                self._record(CheckRow(part=backend, name="all checks", status=CheckStatus.SKIPPED, lines=(why,)))
            else:
                self._check_backend(backend)

    def decide(self, value: Any, judge: Callable[[dict[int, Any]], Any], *, timeout: float) -> Any:
        """Bring this rank's value, as JSON; return what `judge` made of all values by rank, on rank 0.

        `timeout`: for how many seconds the ranks may have worked on their own before. Raises AbsentError where a rank
        does not arrive, and torch's DistError where rank 0 does not decide.
        """
        self._decisions += 1
        keys = [f"{self._decisions}/{rank}" for rank in range(self.size)]
        decided = f"{self._decisions}/decision"
        self.store.set(keys[self.rank], json.dumps(value))
        if self.rank == 0:
            with contextlib.suppress(_dist_error()):
                self.store.wait(keys, timedelta(seconds=timeout + _MARGIN))
            absent = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            decision = None if absent else judge(dict(enumerate(map(json.loads, self.store.multi_get(keys)))))
            self.store.set(decided, json.dumps([absent, decision]))
        self.store.wait([decided], timedelta(seconds=timeout + 2 * _MARGIN))
        self.absent, decision = json.loads(self.store.get(decided))
        if self.absent:
            raise AbsentError
        return decision

    def leave(self, code: int) -> int:
        """Return rank 0's exit code on all ranks: it has reported, and leaves last, since it may serve the store.

        When a rank exits, a launcher may kill the others.
        """
        others = [rank for rank in range(1, self.size) if rank not in self.absent]
        if self.rank:
            self.store.wait(["code"], timedelta(seconds=self.timeout + _MARGIN))
            code = int(self.store.get("code"))
            self.store.set(f"gone/{self.rank}", "")
        elif others:
            self.store.set("code", str(code))
            with contextlib.suppress(_dist_error()):
                self.store.wait([f"gone/{rank}" for rank in others], timedelta(seconds=_MARGIN))
        return code

    def _compare(self, values: dict[int, Any], requested: Sequence[str] | None) -> list[str]:
        """Record the rows of the nodes; return the backends that all ranks can use."""
        environments = {rank: findings.RankEnvironment(**environment) for rank, (environment, _, _) in values.items()}
        for rows in (findings.node_rows, findings.version_rows, findings.env_rows):
            self.rows.extend(rows(environments))
        names = requested or list(values[0][1])
        return [name for name in names if self._is_usable(name, values, requested=requested is not None)]

    def _is_usable(self, backend: str, values: dict[int, Any], *, requested: bool) -> bool:
        """Return whether all ranks have the backend. If none has it, that is only wrong where it was requested."""
        outcomes = {rank: _availability(problems, backend) for rank, (_, problems, _) in values.items()}
        usable = [outcome.status is CheckStatus.OK for outcome in outcomes.values()]
        if not all(usable):
            if any(usable) or requested:
                self._record(findings.merge_outcomes(backend, "available", outcomes))
            return False
        sharing = findings.gpu_sharing_text([gpu for _, _, gpu in values.values()]) if backend == "nccl" else ""
        if sharing:
            self._record(CheckRow(part=backend, name="all checks", status=CheckStatus.SKIPPED, lines=(sharing,)))
        return not sharing

    def _check_backend(self, backend: str) -> None:
        from raylaunch.worker.selfcheck import checks  # noqa: PLC0415

        ctx = checks.CheckContext(
            backend=backend,
            rank=self.rank,
            size=self.size,
            device=checks.device_of(backend),
            timeout=timedelta(seconds=self.timeout),
            store=self.store,
        )
        for name, check in checks.CHECKS:
            self._position = (backend, name)
            self._print(f"{backend}: {name} ...")
            faulthandler.dump_traceback_later(2 * self.timeout)  # a rank that does not come back prints where it is
            outcome = checks.run(check, ctx)
            faulthandler.cancel_dump_traceback_later()
            if self.decide(asdict(outcome), self._judge, timeout=self.timeout):
                self.broken = f"{name} of {backend}"
                why = f"no process group can be used after {name} has failed"
                self._record(CheckRow(part=backend, name="all others", status=CheckStatus.SKIPPED, lines=(why,)))
                return

    def _judge(self, values: dict[int, Any]) -> bool:
        """Record the row of a check; return whether the group cannot be used any more."""
        outcomes = {
            rank: CheckOutcome(**{**value, "status": CheckStatus(value["status"])}) for rank, value in values.items()
        }
        self._record(findings.merge_outcomes(*self._position, outcomes))
        return any(outcome.raised for outcome in outcomes.values())

    def _record(self, row: CheckRow) -> None:
        self.rows.append(row)
        for line in (f"{row.part}: {row.name}: {row.result}", *(f"    {detail}" for detail in row.details)):
            self._print(line)

    def _print(self, line: str) -> None:
        if self.rank == 0:
            print(line, file=sys.stderr, flush=True)  # progress; stdout has only the table


def _availability(problems: dict[str, str], backend: str) -> CheckOutcome:
    problem = problems.get(backend, "torch knows no such backend")
    return CheckOutcome(status=CheckStatus.WRONG, text=problem) if problem else CheckOutcome(status=CheckStatus.OK)


def _make_nccl_raise() -> None:
    """Let NCCL operations raise on a timeout; by default NCCL's watchdog thread ends the process.

    `torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp` has the variables.
    """
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"


def report(check: SelfCheck, path: str | None) -> int:
    """Print the table, write the rows as JSON to `path`, and return the exit code. Only rank 0 prints and writes."""
    if check.rank == 0:
        print(f"\n{findings.table(check.rows)}", end="", flush=True)
        try:
            if path:
                with open(path, "w", encoding="utf-8") as file:
                    file.write(json.dumps([asdict(row) for row in check.rows], indent=2) + "\n")
        except OSError as error:
            return _error(f"cannot write `{path}`: {error.strerror}", "give `--json` a path that rank 0 can write")
    return findings.exit_code(check.rows)


def _dist_error() -> type[Exception]:
    """Return the base of the errors of torch's stores."""
    import torch.distributed as dist  # noqa: PLC0415

    base: type[Exception] = dist.DistError
    return base


def _error(message: str, hint: str, *, code: int = 1) -> int:
    print(f"error: {message}\nhint: {hint}", file=sys.stderr, flush=True)
    return code


def _exit_now(code: int) -> NoReturn:
    """Exit without waiting for a process group that has failed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m raylaunch.worker.selfcheck",
        description="Try every operation of torch.distributed between a job's workers.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=30.0, metavar="SECONDS", help="how long an operation may wait (default: 30)"
    )
    parser.add_argument(
        "--backends", type=_names, metavar="NAME,...", help="the backends to check (default: all that work here)"
    )
    parser.add_argument("--json", metavar="PATH", help="where rank 0 writes the rows")
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        msg = f"a time above 0 is needed, not {text}"
        raise argparse.ArgumentTypeError(msg)
    return seconds


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
