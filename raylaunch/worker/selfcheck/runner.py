"""Runs all checks in order, and records one row for each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from raylaunch.worker.selfcheck import findings, rendezvous, versions
from raylaunch.worker.selfcheck.bounded_check import run_bounded
from raylaunch.worker.selfcheck.check_context import CheckContext, another_connection, device_of
from raylaunch.worker.selfcheck.collectives import CHECKS
from raylaunch.worker.selfcheck.coordinator import AbsentError, Coordinator
from raylaunch.worker.selfcheck.findings import CheckOutcome, CheckRow, CheckStatus
from raylaunch.worker.selfcheck.models import MODELS, speed

FIRST_TIMEOUT = 120.0
"""Seconds that ranks may start apart from each other: each of them imports torch first."""
_GRACE_SECONDS = 5.0
"""What a check may take in addition to the waiting that its timeout limits."""
_MAX_TIMEOUTS = 3
"""After so many timeouts in a row, the remaining checks of a backend are skipped."""

Check = Callable[[CheckContext], Any]


@dataclass(slots=True, kw_only=True)
class CheckRunner:
    """The whole self-check, as one rank runs it. Only rank 0 has rows of a check that ran."""

    coordinator: Coordinator
    timeout: float
    """Seconds that an operation may wait for other ranks."""
    grace: float = _GRACE_SECONDS
    rows: list[CheckRow] = field(default_factory=list)
    halted: str = ""
    """Why no further process group can be made, on any rank."""
    contexts: list[CheckContext] = field(default_factory=list)
    _position: tuple[str, str] = ("nodes", "all ranks")

    def run(self, backends: Sequence[str] | None, path: str | None) -> None:
        """Run all checks with these backends, or with all that work here.

        `path` is where the files of `file://` begin. Raises AbsentError and SilentError.
        """
        self.coordinator.set_position("comparing the nodes")
        own = asdict(versions.rank_environment()), versions.backend_problems(), versions.gpu_id()
        _make_nccl_raise()
        usable = self.coordinator.decide(own, lambda values: self._compare(values, backends), timeout=FIRST_TIMEOUT)
        shared = rendezvous.find_shared_path(self.coordinator, path, self.timeout)
        for backend in usable:
            self._check_backend(backend, shared)

    @property
    def has_leftovers(self) -> bool:
        """Whether a thread or a process group was abandoned that may still wait."""
        return bool(self.halted) or any(context.abandoned for context in self.contexts)

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

    def _check_backend(self, backend: str, shared: rendezvous.SharedPath) -> None:
        ctx = CheckContext(
            backend=backend,
            rank=self.coordinator.rank,
            size=self.coordinator.size,
            device=device_of(backend),
            timeout=timedelta(seconds=self.timeout),
            store=another_connection(self.coordinator.store),
        )
        self.contexts.append(ctx)
        path = f"{shared.prefix}.{backend}"
        with rendezvous.removed_after(path, by_this_rank=ctx.rank == 0):
            self._check_rendezvous(ctx, path, shared.why_not)
        self._check_operations(ctx)

    def _check_operations(self, ctx: CheckContext) -> None:
        """Run the checks of operations in one process group, and after a failure in a new one."""
        why_not, timeouts, has_group = "", 0, False
        for name, check in (*CHECKS, *MODELS, ("all_reduce speed", speed)):
            if not has_group and not why_not and not self.halted:
                has_group = self._init_group(ctx, "group for the checks", CheckContext.init_new_group, quiet=True)
                why_not = "" if has_group else "no group could be made"
            if not has_group:
                self._skip(ctx.backend, name, self.halted or why_not)
                continue
            result = self._run_check(ctx, name, check)
            timeouts = timeouts + 1 if result["late"] else 0
            if timeouts == _MAX_TIMEOUTS:
                why_not = f"{timeouts} checks before it ran into the timeout"
            if why_not or not result["clean"]:
                self._destroy_group(ctx, failed=True)
                has_group = False
        if has_group:
            self._destroy_group(ctx, failed=False)

    def _check_rendezvous(self, ctx: CheckContext, path: str, no_path: str) -> None:
        """Check the three ways to make a process group, each with a group of its own."""
        port = rendezvous.free_port_of_rank_0(self.coordinator, self.timeout)
        methods: tuple[tuple[str, Check], ...] = (
            ("init env://", rendezvous.init_env),
            ("init tcp://", lambda ctx: rendezvous.init_tcp(ctx, port)),
            ("init file://", lambda ctx: rendezvous.init_file(ctx, path)),
        )
        for name, method in methods:
            why_not = self.halted or (no_path if name == "init file://" else "")
            if why_not:
                self._skip(ctx.backend, name, why_not)
            elif self._init_group(ctx, name, method):
                self._destroy_group(ctx, failed=False)

    def _init_group(self, ctx: CheckContext, name: str, method: Check, *, quiet: bool = False) -> bool:
        """Make a process group; return whether that worked.

        A rank that is stuck in this may make its group later, in the place of another one, so no others can be made.
        """
        result = self._run_check(ctx, name, method, limit=2 * self.timeout + self.grace, quiet=quiet)
        if result["stuck"]:
            self.halted = f"a rank is stuck in {name} of {ctx.backend}"
        elif not result["clean"]:
            self._destroy_group(ctx, failed=True)
        return bool(result["clean"])

    def _destroy_group(self, ctx: CheckContext, *, failed: bool) -> None:
        result = self._run_check(ctx, "end of the group", lambda ctx: ctx.destroy_group(failed=failed), quiet=True)
        if not result["clean"]:
            self.halted = f"a group of {ctx.backend} did not end"

    def _run_check(
        self, ctx: CheckContext, name: str, check: Check, *, limit: float = 0.0, quiet: bool = False
    ) -> dict[str, bool]:
        """Run one check on all ranks, and record its row; a quiet check has a row only if it fails.

        Return the same on all ranks: `clean` (it did not fail), `late` (a rank timed out), `stuck` (a rank did not
        return within `limit` seconds).
        """
        self._position = (ctx.backend, name)
        self.coordinator.set_position(f"{ctx.backend} {name}")
        if not quiet:
            self._print(f"{ctx.backend}: {name} ...")
        limit = limit or self.timeout + self.grace
        outcome = run_bounded(lambda: _run_on_device(check, ctx), timeout=self.timeout, limit=limit)

        def judge(values: dict[int, Any]) -> dict[str, bool]:
            outcomes = {
                rank: CheckOutcome(**{**value, "status": CheckStatus(value["status"])})
                for rank, value in values.items()
            }
            row = findings.merge_outcomes(ctx.backend, name, outcomes)
            if not (quiet and row.status is CheckStatus.OK):
                self._record(row)
            return {
                "clean": row.status in (CheckStatus.OK, CheckStatus.INFO, CheckStatus.SKIPPED),
                "late": any(one.late for one in outcomes.values()),
                "stuck": any(one.stuck for one in outcomes.values()),
            }

        result: dict[str, bool] = self.coordinator.decide(asdict(outcome), judge, timeout=limit)
        return result

    def _skip(self, backend: str, name: str, why: str) -> None:
        self._record(CheckRow(part=backend, name=name, status=CheckStatus.SKIPPED, lines=(why,)))

    def _record(self, row: CheckRow) -> None:
        self.rows.append(row)
        for line in (f"{row.part}: {row.name}: {row.result}", *(f"    {detail}" for detail in row.details)):
            self._print(line)

    def _print(self, line: str) -> None:
        if self.coordinator.rank == 0:
            print(line, file=sys.stderr, flush=True)  # progress; stdout has only the table


def _run_on_device(check: Check, ctx: CheckContext) -> str:
    """Run the check with the rank's own device as the current one of this thread."""
    import torch  # noqa: PLC0415

    if ctx.device.type != "cpu":
        torch.accelerator.set_device_index(ctx.device.index)
    text = check(ctx)
    return text if isinstance(text, str) and ctx.rank == 0 else ""


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
