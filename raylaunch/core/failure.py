"""What failures mean: which one is the cause, which only followed, and whether a restart can help."""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SAME_FAILURE_LIMIT = 3
SAME_FAILURE_WINDOW = 60.0
"""Seconds: this many equal failures within this time, and the next restart would end the same way."""

_HOPELESS_TYPES = ("SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError")

_COLLATERAL = re.compile(
    r"connection (reset|closed|refused)|broken pipe|closed by (peer|remote)|socket (closed|timeout)"
    r"|gloo.*(timed out|timeout|connectFullMesh)|(nccl|watchdog).*(abort|timeout|timed out|remote)"
    r"|recvValue failed|sendBytes failed|failed to recv|wait timeout after|DistBackendError|DistNetworkError"
    r"|DistStoreError",
    re.IGNORECASE,
)
"""What a healthy rank says when a peer is gone. Never the cause while another failure is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerError:
    """An exception that ended a worker, as its boot code or `@record` wrote it down."""

    type: str
    message: str
    traceback: str
    hopeless: bool = False
    """The worker could not even begin: no script, a syntax error, a missing module."""

    @property
    def place(self) -> str:
        """`file:line` of the innermost frame, `""` where the traceback has none."""
        frames = re.findall(r'^\s*File "(.*?)", line (\d+)', self.traceback, re.MULTILINE)
        return ":".join(frames[-1]) if frames else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One worker that did not end well."""

    attempt: int
    node: str
    rank: int
    local_rank: int
    pid: int
    at: float
    """When it died, seconds since the run began."""
    exit_code: int
    """As in `subprocess`: -9 stands for death by SIGKILL."""
    error: WorkerError | None = None
    evidence: str = ""
    """What else is known, such as a kill by the kernel for lack of memory."""
    stopped: bool = False
    """We ended it; it is no cause of anything."""
    stdout: str = ""
    stderr: str = ""
    """Paths of its log files on its node."""
    tail: str = ""
    """The last lines of its stderr."""

    @property
    def signal(self) -> str:
        """`SIGKILL` and the like; `""` where it exited by itself."""
        if self.exit_code >= 0:
            return ""
        try:
            return signals.Signals(-self.exit_code).name
        except ValueError:
            return f"signal {-self.exit_code}"

    @property
    def what(self) -> str:
        """What happened to it, in a few words: `raised ValueError: loss is NaN`."""
        if self.error is not None:
            first_line = self.error.message.strip().split("\n", 1)[0]
            if self.error.hopeless:
                return f"could not begin: {first_line}"
            return f"raised {self.error.type}: {first_line}" if first_line else f"raised {self.error.type}"
        if self.exit_code < 0:
            return f"was killed by {self.signal}" + (f" ({self.evidence})" if self.evidence else "")
        return f"exited with code {self.exit_code}"

    @property
    def is_collateral(self) -> bool:
        """Whether it looks like what a healthy worker says when a peer is gone."""
        if self.error is not None:
            return bool(_COLLATERAL.search(f"{self.error.type}: {self.error.message}"))
        return self.exit_code == -signals.SIGABRT and bool(_COLLATERAL.search(self.tail))

    @property
    def signature(self) -> str:
        """Equal for failures of the same kind at the same place, whatever the numbers in their texts.

        `""` for a death by signal: it came from outside, and says nothing of where the program was.
        """
        if self.error is not None:
            return f"{self.error.type} at {self.error.place}" if self.error.place else _blank(self.what)
        return f"rank {self.rank} {self.what}" if self.exit_code > 0 else ""


def root_cause(failures: Iterable[Failure]) -> Failure | None:
    """The failure that began it: never one of our own making, a peer's echo only for want of better, else the first."""
    own = [failure for failure in failures if not failure.stopped]
    return min(own, key=lambda failure: (failure.is_collateral, failure.at, failure.rank), default=None)


def consequences(failures: Iterable[Failure], cause: Failure) -> list[tuple[str, tuple[int, ...]]]:
    """What followed from the cause: a text and the ranks it befell, the commonest first."""
    groups: dict[str, list[Failure]] = {}
    for failure in failures:
        if (failure.rank, failure.node) == (cause.rank, cause.node):
            continue
        how = failure.signal or f"exit code {failure.exit_code}"
        what = f"stopped by raylaunch ({how})" if failure.stopped else _blank(failure.what)
        groups.setdefault(what, []).append(failure)
    found = [
        (what if members[0].stopped else members[0].what, tuple(sorted(member.rank for member in members)))
        for what, members in groups.items()
    ]
    return sorted(found, key=lambda group: (-len(group[1]), group[1]))


def why_hopeless(cause: Failure, earlier: Sequence[tuple[float, str]], now: float) -> str:
    """Why a restart cannot help, or `""`. `earlier` holds (at, signature) of the causes before this one."""
    if cause.error is not None and cause.error.hopeless:
        return "a restart cannot mend that"
    if cause.error is not None and cause.error.type in _HOPELESS_TYPES:
        return f"a restart cannot mend {cause.error.type}"
    recent = [signature for at, signature in earlier if now - at <= SAME_FAILURE_WINDOW]
    same = [signature for signature in recent[-(SAME_FAILURE_LIMIT - 1) :] if signature == cause.signature]
    if cause.signature and len(same) == SAME_FAILURE_LIMIT - 1 and not cause.is_collateral:
        return f"the same failure {SAME_FAILURE_LIMIT} times within {SAME_FAILURE_WINDOW:.0f} s"
    return ""


def _blank(text: str) -> str:
    """The text with its numbers blanked, so that `port 41234` and `port 41235` are one."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text)
