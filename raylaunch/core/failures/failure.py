"""Failures of workers: which one is the root cause, which followed from it, and whether a restart can help."""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raylaunch.core.newtypes import NodeId, RunTime
from raylaunch.core.text import capped

MOST_TYPE = 200
MOST_MESSAGE = 4_000
_MOST_TRACEBACK = 16_000
"""Characters of an exception that are kept; the worker's own output has all of it."""
_MOST_SHOWN = 400
"""Characters of a message that are shown in one line."""

_SAME_FAILURE_LIMIT = 3
SAME_FAILURE_WINDOW = 60.0
"""A restart counts as useless after `_SAME_FAILURE_LIMIT` equal failures within `SAME_FAILURE_WINDOW` seconds."""

UNKNOWN_TYPE = "error"
"""The type of an error whose error file has only a message."""

_HOPELESS_TYPES = ("SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError")

_COLLATERAL = re.compile(
    r"connection (reset|closed|refused)|broken pipe|closed by (peer|remote)|socket (closed|timeout)"
    r"|recvValue failed|sendBytes failed|failed to recv|wait timeout after|DistBackendError|DistNetworkError"
    r"|DistStoreError",
    re.IGNORECASE,
)
"""Errors of a healthy rank that lost a peer. They are never the root cause while another failure is known."""

_COLLATERAL_OF = (
    (re.compile("gloo", re.IGNORECASE), re.compile("timed out|timeout|connectFullMesh", re.IGNORECASE)),
    (re.compile("nccl|watchdog", re.IGNORECASE), re.compile("abort|timeout|timed out|remote", re.IGNORECASE)),
)
"""The same for a library: its name, and what follows in the line. As one pattern, the search would be quadratic."""

_OWN = re.compile(
    r"address already in use|EADDRINUSE|Duplicate GPU|ncclInvalid(Usage|Argument)"
    r"|CUDA error: (an illegal|a misaligned|device-side assert|unspecified launch|uncorrectable)",
    re.IGNORECASE,
)
"""Errors of the same types that are the rank's own fault. NCCL's watchdog aborts a rank that has a CUDA error."""

_FRAME = re.compile(r'^[ \t|+]*File "([^"\n]*)", line (\d+)', re.MULTILINE)
"""A frame in a traceback, also in one of an exception group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerError:
    """An exception that ended a worker, as the boot code or `@record` reported it."""

    type: str
    message: str
    traceback: str
    hopeless: bool = False
    """The script could not start: no such file, a syntax error, a missing module."""
    from_file: bool = False
    """Only the error file tells of the exception: the worker may have caught it and gone on."""
    timestamp: int = 0
    """When it was reported, in seconds since the epoch on the worker's clock; 0 if unknown."""
    written: str = ""
    """The error file as JSON, if it holds more than these fields or has another form; else empty."""

    @property
    def text(self) -> str:
        """`type: message`, or the message alone if the type is unknown."""
        return self.message if self.type == UNKNOWN_TYPE else f"{self.type}: {self.message}"

    @property
    def place(self) -> str:
        """`file:line` of the innermost frame; "" if the traceback has none."""
        frames = _FRAME.findall(self.traceback)
        return ":".join(frames[-1]) if frames else ""


NO_FIRST_STEP = "no first step"
"""How `Failure.hung` begins for a worker that has not completed a step in the attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """How a worker ended, as its node sees it. Subclasses add the time, on the node's clock or the run's."""

    attempt: int
    rank: int
    local_rank: int
    pid: int
    exit_code: int
    """As in `subprocess`: -9 means killed by SIGKILL."""
    error: WorkerError | None = None
    """The exception that ended it, as it reported it or wrote it into its error file."""
    evidence: str = ""
    """What else is known, such as a kill by the kernel's OOM killer."""
    killed_with: str = ""
    """The process of raylaunch whose own death killed the worker, such as `the fork server (process 12)`."""
    stopped: bool = False
    """raylaunch ended the worker, so it is not a cause."""
    saved: int | None = None
    """The last step that it had saved in the attempt, by `checkpointed` or a commit of `State`; None: none."""
    stdout: str = ""
    stderr: str = ""
    """Paths of its log files on the node; "" if none are kept."""
    tail: str = ""
    """The last lines of its stderr."""
    host: str = ""
    """The host name of the node, as the node itself reports it."""
    error_file: str = ""
    """Path of the error file on the node; "" if there is none."""
    spoilt: str = ""
    """Why the error file cannot be read; "" if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(FailureRecord):
    """One worker that was killed, exited with a code other than 0, or hung."""

    node: NodeId
    at: RunTime
    """When it died, or gave its last sign of life if it hung."""
    hung: str = ""
    """If the worker was alive but made no steps: for how long, and at which place."""
    hung_at: str = ""
    """The `file:line` where it hung, if known."""
    waited: bool = False
    """It hung in a collective, like every rank that waits for another."""

    @property
    def signal(self) -> str:
        """The name of the signal that killed it, such as `SIGKILL`; "" if it exited."""
        return _name_of(-self.exit_code) if self.exit_code < 0 else ""

    @property
    def shell_signal(self) -> str:
        """The signal that killed the command of a shell, which exits with 128 plus the signal's number; else ""."""
        name = _name_of(self.exit_code - 128)
        return name if name in signals.Signals.__members__ else ""

    @property
    def exception(self) -> WorkerError | None:
        """The exception that ended the worker. Not one in an error file if a signal killed the worker later."""
        outlived = self.error is not None and self.error.from_file and self.exit_code < 0
        return None if outlived or self.hung else self.error

    @property
    def what(self) -> str:
        """What happened, as a predicate of the rank: `raised ValueError: loss is NaN`."""
        if self.hung:
            return f"hung: {self.hung}"
        if self.exception is not None:
            then = f", then was killed by {self.signal}" if self.signal else ""
            return f"{_raised(self.exception)}{then}{_in_brackets(self.evidence)}"
        if self.exit_code < 0:
            before = f"; its error file says that it {_raised(self.error)}" if self.error is not None else ""
            whole = f"together with {self.killed_with}" if self.killed_with else ""
            return f"was killed by {self.signal}{_in_brackets(whole, self.evidence)}{before}"
        known = (f"as a shell says of {self.shell_signal}" if self.shell_signal else "", self.evidence)
        return f"exited with code {self.exit_code}{_in_brackets(*known)}"

    @property
    def is_collateral(self) -> bool:
        """Whether it looks like the error of a healthy worker that lost a peer."""
        if self.exception is not None:
            return is_of_lost_peer(self.exception.text)
        if self.hung:
            return self.waited
        is_own = self.exit_code != -signals.SIGABRT or _OWN.search(self.tail) is not None
        return not is_own and _tells_of_lost_peer(self.tail)

    @property
    def signature(self) -> str:
        """A text that is equal for failures of the same kind at the same place; numbers in messages do not count.

        It is "" for a kill by a signal, which says nothing of where the program was.
        """
        error = self.exception
        if self.hung:
            return f"hung at {self.hung_at}" if self.hung_at else ""
        if error is not None:
            return f"{error.type} at {error.place}" if error.place else _blank(self.what)
        return f"rank {self.rank} exited with code {self.exit_code}" if self.exit_code >= 0 else ""

    @property
    def kind(self) -> str:
        """A text that is equal for failures of the same kind on any rank. Kills by the same signal are of one kind."""
        if self.exception is None and not self.hung:
            return self.signal or f"exited with code {self.exit_code}"
        return self.signature


def capped_traceback(text: str) -> str:
    """Return a traceback of at most `_MOST_TRACEBACK` characters, in which a long message hides no frames."""
    lines = text.split("\n") if len(text) > MOST_MESSAGE else [text]
    return capped("\n".join(capped(line, MOST_MESSAGE) for line in lines), _MOST_TRACEBACK)


def root_cause(failures: Iterable[Failure]) -> Failure | None:
    """Return the first failure, but a collateral one only if there is no other, and never one that raylaunch caused."""
    own = sorted((each for each in failures if not each.stopped), key=lambda failure: (failure.at, failure.rank))
    return next((failure for failure in own if not failure.is_collateral), own[0] if own else None)


def alike(failures: Iterable[Failure], cause: Failure) -> tuple[int, ...]:
    """Return the other ranks that failed in the same way as the root cause, such as for a missing module.

    A rank that raised the same exception is one of them, though raylaunch may have ended it before it had exited.
    """
    return tuple(sorted(failure.rank for failure in failures if _is_like(failure, cause)))


def consequences(failures: Iterable[Failure], cause: Failure) -> list[tuple[str, tuple[int, ...]]]:
    """Return the failures that followed from the root cause: (what happened, ranks), the most frequent first."""
    groups: dict[str, list[Failure]] = {}
    for failure in failures:
        if _is_same(failure, cause) or _is_like(failure, cause):
            continue
        groups.setdefault(_blank(_followed(failure)), []).append(failure)
    found = [(_followed(members[0]), tuple(sorted(member.rank for member in members))) for members in groups.values()]
    return sorted(found, key=lambda group: (-len(group[1]), group[1]))


def _is_same(failure: Failure, cause: Failure) -> bool:
    return (failure.rank, failure.node) == (cause.rank, cause.node)


def _is_like(failure: Failure, cause: Failure) -> bool:
    if _is_same(failure, cause):
        return False
    if failure.exception is not None and cause.exception is not None:
        return _blank(_raised(failure.exception)) == _blank(_raised(cause.exception))
    return not failure.stopped and _blank(failure.what) == _blank(cause.what)


def _followed(failure: Failure) -> str:
    """Return what happened to a rank after the root cause; of a lost peer, what torch says of it is left out."""
    happened = failure.what if failure.exception is None or not failure.stopped else _raised(failure.exception)
    if failure.exception is not None and failure.is_collateral:
        happened = f"lost the connection to another rank ({failure.exception.type})"
    if not failure.stopped:
        return happened
    if failure.exception is not None:
        return f"{happened}; stopped by raylaunch"
    return f"stopped by raylaunch ({failure.signal or f'exit code {failure.exit_code}'})"


def why_hopeless(cause: Failure, earlier: Sequence[tuple[float, str]], now: float) -> str:
    """Return why a restart cannot help, or "". `earlier` has (at, signature) of the earlier root causes."""
    if cause.exception is not None and cause.exception.hopeless:
        return "a restart cannot mend that"
    if cause.exception is not None and cause.exception.type in _HOPELESS_TYPES:
        return f"a restart cannot mend {cause.exception.type}"
    recent = [signature for at, signature in earlier if now - at <= SAME_FAILURE_WINDOW]
    same = [signature for signature in recent[-(_SAME_FAILURE_LIMIT - 1) :] if signature == cause.signature]
    if cause.signature and len(same) == _SAME_FAILURE_LIMIT - 1 and not cause.is_collateral:
        return f"the same failure {_SAME_FAILURE_LIMIT} times within {SAME_FAILURE_WINDOW:.0f} s"
    return ""


def is_of_lost_peer(text: str) -> bool:
    """Return whether an exception, as `type: message`, suggests that a healthy worker lost a peer."""
    return _tells_of_lost_peer(text) and not _OWN.search(text)


def _tells_of_lost_peer(text: str) -> bool:
    if _COLLATERAL.search(text):
        return True
    for line in text.split("\n"):
        for library, trouble in _COLLATERAL_OF:
            name = library.search(line)
            if name is not None and trouble.search(line, name.end()):
                return True
    return False


def _raised(error: WorkerError) -> str:
    first_line = capped(error.message.strip().split("\n", 1)[0], _MOST_SHOWN)
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
    """Replace the numbers in a text, so that `port 41234` and `port 41235` are equal."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text)
