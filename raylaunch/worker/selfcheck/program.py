"""The self-check's command line, its course on one rank, its output, and its exit code. Imports torch only to run."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

from raylaunch.worker import torch_internals
from raylaunch.worker.selfcheck import findings, versions
from raylaunch.worker.selfcheck.coordinator import AbsentError, Coordinator, SilentError
from raylaunch.worker.selfcheck.findings import CheckOutcome, CheckRow, CheckStatus

_FIRST_TIMEOUT = 120.0
"""Seconds that ranks may start apart from each other: each of them imports torch first."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the self-check, and return its exit code, which is the same on all ranks: 0 if nothing is wrong."""
    options = _parser().parse_args(argv)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return _error("RANK or WORLD_SIZE is not set: no launcher started this", "run it by `raylaunch check`", code=2)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _import_torch()
    if rank == 0:
        print(f"waiting for all {size} ranks ..." if size > 1 else "one rank", file=sys.stderr, flush=True)
    try:
        store = _launch_store(rank, size, timedelta(seconds=max(options.timeout, _FIRST_TIMEOUT)))
    except Exception as error:  # noqa: BLE001
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return _error(f"rank {rank} cannot use the store at {where}: {error}", "look for a firewall between the nodes")
    check = SelfCheck(coordinator=Coordinator(store, rank, size), timeout=options.timeout)
    try:
        check.run(options.backends)
        code = check.agree_on_exit_code(report(check, options.json))
    except AbsentError as absent:
        check.record_absent(absent)
        report(check, options.json)
        check.coordinator.wait_until_absent_are_reported()
        _exit_now(1)
    except SilentError as silent:
        _error(f"rank {rank}: {silent}", "look at rank 0's output and at its node")
        _exit_now(1)
    if check.broken:
        _exit_now(code)
    return code


def _import_torch() -> None:
    """Import what the checks need, so that no check's time includes it, and hide torch's FutureWarnings."""
    torch_internals.import_compiler()
    import raylaunch.worker.selfcheck.checks  # noqa: F401, PLC0415

    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")


def _launch_store(rank: int, size: int, timeout: timedelta) -> Any:
    """Return the store that `init_process_group()` would use, with a prefix of the self-check."""
    import torch.distributed as dist  # noqa: PLC0415

    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
    return dist.PrefixStore("selfcheck", store)


@dataclass(slots=True, kw_only=True)
class SelfCheck:
    """The whole self-check, as one rank runs it. Only rank 0 has rows of a check that ran.

    No operation is interrupted. Where a rank does not come back from one, rank 0 says so after `timeout` and ends the
    check, and the rank itself prints its stack.
    """

    coordinator: Coordinator
    timeout: float
    """Seconds that an operation may wait for other ranks."""
    rows: list[CheckRow] = field(default_factory=list)
    broken: str = ""
    """The check that failed so that no process group can be used any more, on any rank."""
    _position: tuple[str, str] = ("nodes", "all ranks")

    def run(self, backends: Sequence[str] | None) -> None:
        """Run all checks with these backends, or with all that work here. Raises AbsentError and SilentError."""
        self.coordinator.set_position("comparing the nodes")
        own = asdict(versions.rank_environment()), versions.backend_problems(), versions.gpu_id()
        _make_nccl_raise()
        usable = self.coordinator.decide(own, lambda values: self._compare(values, backends), timeout=_FIRST_TIMEOUT)
        for backend in usable:
            if self.broken:
                why = f"{self.broken} failed; check this alone with `--backends {backend}`"
                self._record(CheckRow(part=backend, name="all checks", status=CheckStatus.SKIPPED, lines=(why,)))
            else:
                self._check_backend(backend)

    def agree_on_exit_code(self, code: int) -> int:
        """Return rank 0's exit code on all ranks; on rank 0 last."""
        code = int(self.coordinator.decide(code, lambda values: values[0], timeout=self.timeout))
        self.coordinator.leave()
        return code

    def record_absent(self, absent: AbsentError) -> None:
        """Record the row of the ranks that did not arrive, at the check that was running."""
        self._record(findings.absent_row(*self._position, absent.where))

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
            rank=self.coordinator.rank,
            size=self.coordinator.size,
            device=checks.device_of(backend),
            timeout=timedelta(seconds=self.timeout),
            store=self.coordinator.store,
        )
        for name, check in checks.CHECKS:
            self._position = (backend, name)
            self.coordinator.set_position(f"{backend} {name}")
            self._print(f"{backend}: {name} ...")
            faulthandler.dump_traceback_later(2 * self.timeout)  # a rank that does not come back prints where it is
            outcome = checks.run(check, ctx)
            faulthandler.cancel_dump_traceback_later()
            if self.coordinator.decide(asdict(outcome), self._judge, timeout=self.timeout):
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
        if self.coordinator.rank == 0:
            print(line, file=sys.stderr, flush=True)  # progress; stdout has only the table


def _availability(problems: dict[str, str], backend: str) -> CheckOutcome:
    problem = problems.get(backend, "torch knows no such backend")
    return CheckOutcome(status=CheckStatus.WRONG, text=problem) if problem else CheckOutcome(status=CheckStatus.OK)


def _make_nccl_raise() -> None:
    """Let NCCL operations raise on a timeout; by default NCCL's watchdog thread ends the process.

    The variables are those of `torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp`.
    """
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"


def report(check: SelfCheck, path: str | None) -> int:
    """Print the table, write the rows as JSON to `path`, and return the exit code. Only rank 0 prints and writes."""
    if check.coordinator.rank == 0:
        print(f"\n{findings.table(check.rows)}", end="", flush=True)
        try:
            if path:
                with open(path, "w", encoding="utf-8") as file:
                    file.write(json.dumps([asdict(row) for row in check.rows], indent=2) + "\n")
        except OSError as error:
            return _error(f"cannot write `{path}`: {error.strerror}", "give `--json` a path that rank 0 can write")
    return findings.exit_code(check.rows)


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
