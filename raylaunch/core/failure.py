"""What failures mean: which one is the cause, which only followed, and whether a restart can help."""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SAME_FAILURE_LIMIT = 3
SAME_FAILURE_WINDOW = 60.0
"""Seconds: this many equal failures within this time, and the next restart would end the same way."""

UNKNOWN_TYPE = "error"
"""The type of an error of which an error file has only a text."""

_HOPELESS_TYPES = ("SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError")

_COLLATERAL = re.compile(
    r"connection (reset|closed|refused)|broken pipe|closed by (peer|remote)|socket (closed|timeout)"
    r"|gloo.*(timed out|timeout|connectFullMesh)|(nccl|watchdog).*(abort|timeout|timed out|remote)"
    r"|recvValue failed|sendBytes failed|failed to recv|wait timeout after|DistBackendError|DistNetworkError"
    r"|DistStoreError",
    re.IGNORECASE,
)
"""What a healthy rank says when a peer is gone. Never the cause while another failure is known."""

_OWN = re.compile(r"address already in use|EADDRINUSE|Duplicate GPU|ncclInvalid(Usage|Argument)", re.IGNORECASE)
"""What errors of the same types say where the rank itself did something wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerError:
    """An exception that ended a worker, as its boot code or `@record` wrote it down."""

    type: str
    message: str
    traceback: str
    hopeless: bool = False
    """The worker could not even begin: no script, a syntax error, a missing module."""
    from_file: bool = False
    """Only its error file tells of it: the worker may have lived on after it."""
    timestamp: int = 0
    """When it was written down, seconds since the epoch on the worker's clock; 0 where that is not known."""
    written: str = ""
    """The worker's error file as JSON, where it holds more than this, or is in another form."""

    @property
    def text(self) -> str:
        """Type and message; the message alone where the type is not known."""
        return self.message if self.type == UNKNOWN_TYPE else f"{self.type}: {self.message}"

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
    host: str = ""
    """The host name of its node, as the node itself knows it."""
    error_file: str = ""
    """Path of its error file on its node, `""` where there is none."""
    spoilt: str = ""
    """Why its error file cannot be read, where it cannot."""
    hung: str = ""
    """It was alive, and made no steps: for how long, and at which place. `at` is its last sign of life then."""
    hung_at: str = ""
    """The `file:line` where it hung, where that is known."""
    waited: bool = False
    """It hung in a collective, as all do that wait for another."""

    @property
    def signal(self) -> str:
        """`SIGKILL` and the like; `""` where it exited by itself."""
        return _name_of(-self.exit_code) if self.exit_code < 0 else ""

    @property
    def shell_signal(self) -> str:
        """The signal that a shell means by an exit code of 128 and its number: the end of a command it ran."""
        name = _name_of(self.exit_code - 128)
        return name if name in signals.Signals.__members__ else ""

    @property
    def exception(self) -> WorkerError | None:
        """What ended it, where that was an exception: not one that only an error file tells of before a kill."""
        outlived = self.error is not None and self.error.from_file and self.exit_code < 0
        return None if outlived or self.hung else self.error

    @property
    def what(self) -> str:
        """What happened to it, in a few words: `raised ValueError: loss is NaN`."""
        if self.hung:
            return f"hung: {self.hung}"
        if self.exception is not None:
            then = f", then was killed by {self.signal}" if self.signal else ""
            return _said(self.exception) + then
        if self.exit_code < 0:
            before = f"; its error file says that it {_said(self.error)}" if self.error is not None else ""
            return f"was killed by {self.signal}{_in_brackets(self.evidence)}{before}"
        known = (f"as a shell says of {self.shell_signal}" if self.shell_signal else "", self.evidence)
        return f"exited with code {self.exit_code}{_in_brackets(*known)}"

    @property
    def is_collateral(self) -> bool:
        """Whether it looks like what a healthy worker says when a peer is gone."""
        if self.exception is not None:
            return bool(_COLLATERAL.search(self.exception.text)) and not _OWN.search(self.exception.text)
        if self.hung:
            return self.waited
        return self.exit_code == -signals.SIGABRT and bool(_COLLATERAL.search(self.tail))

    @property
    def signature(self) -> str:
        """Equal for failures of the same kind at the same place, whatever the numbers in their texts.

        `""` for a death by signal: it came from outside, and says nothing of where the program was.
        """
        error = self.exception
        if self.hung:
            return f"hung at {self.hung_at}" if self.hung_at else ""
        if error is not None:
            return f"{error.type} at {error.place}" if error.place else _blank(self.what)
        return f"rank {self.rank} exited with code {self.exit_code}" if self.exit_code > 0 else ""

    @property
    def kind(self) -> str:
        """Equal for failures of the same kind, whichever rank they befell, and deaths by a signal are of a kind too."""
        if self.exception is None and not self.hung:
            return self.signal or f"exited with code {self.exit_code}"
        return self.signature


def root_cause(failures: Iterable[Failure]) -> Failure | None:
    """The failure that began it: never one of our own making, a peer's echo only for want of better, else the first."""
    own = [failure for failure in failures if not failure.stopped]
    return min(own, key=lambda failure: (failure.is_collateral, failure.at, failure.rank), default=None)


def alike(failures: Iterable[Failure], cause: Failure) -> tuple[int, ...]:
    """The ranks that ended in the same way as the cause: a missing module is missing for all of them."""
    return tuple(sorted(failure.rank for failure in failures if _is_like(failure, cause)))


def consequences(failures: Iterable[Failure], cause: Failure) -> list[tuple[str, tuple[int, ...]]]:
    """What followed from the cause: a text and the ranks it befell, the commonest first."""
    groups: dict[str, list[Failure]] = {}
    for failure in failures:
        if _is(failure, cause) or _is_like(failure, cause):
            continue
        how = failure.signal or f"exit code {failure.exit_code}"
        what = f"stopped by raylaunch ({how})" if failure.stopped else _blank(failure.what)
        groups.setdefault(what, []).append(failure)
    found = [
        (what if members[0].stopped else members[0].what, tuple(sorted(member.rank for member in members)))
        for what, members in groups.items()
    ]
    return sorted(found, key=lambda group: (-len(group[1]), group[1]))


def _is(failure: Failure, cause: Failure) -> bool:
    return (failure.rank, failure.node) == (cause.rank, cause.node)


def _is_like(failure: Failure, cause: Failure) -> bool:
    return not failure.stopped and not _is(failure, cause) and _blank(failure.what) == _blank(cause.what)


def why_hopeless(cause: Failure, earlier: Sequence[tuple[float, str]], now: float) -> str:
    """Why a restart cannot help, or `""`. `earlier` holds (at, signature) of the causes before this one."""
    if cause.exception is not None and cause.exception.hopeless:
        return "a restart cannot mend that"
    if cause.exception is not None and cause.exception.type in _HOPELESS_TYPES:
        return f"a restart cannot mend {cause.exception.type}"
    recent = [signature for at, signature in earlier if now - at <= SAME_FAILURE_WINDOW]
    same = [signature for signature in recent[-(SAME_FAILURE_LIMIT - 1) :] if signature == cause.signature]
    if cause.signature and len(same) == SAME_FAILURE_LIMIT - 1 and not cause.is_collateral:
        return f"the same failure {SAME_FAILURE_LIMIT} times within {SAME_FAILURE_WINDOW:.0f} s"
    return ""


def _said(error: WorkerError) -> str:
    first_line = error.message.strip().split("\n", 1)[0]
    if error.hopeless:
        return f"could not begin: {first_line}"
    return f"raised {error.type}: {first_line}" if first_line else f"raised {error.type}"


def _in_brackets(*known: str) -> str:
    text = "; ".join(part for part in known if part)
    return f" ({text})" if text else ""


def _name_of(signal: int) -> str:
    try:
        return signals.Signals(signal).name
    except ValueError:
        return f"signal {signal}"


def _blank(text: str) -> str:
    """The text with its numbers blanked, so that `port 41234` and `port 41235` are one."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text)
