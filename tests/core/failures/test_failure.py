"""Failures: their texts, the root cause, its consequences, and when a restart cannot help."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machine_helpers import failure, raised

from raylaunch.core.failures.failure import (
    SAME_FAILURE_WINDOW,
    Failure,
    WorkerError,
    alike,
    capped_traceback,
    consequences,
    root_cause,
    why_hopeless,
)
from raylaunch.core.failures.hints import hints
from tests.core.adversarial import steep

TWO_FRAMES = """Traceback (most recent call last):
  File "/job/train.py", line 88, in step
    loss.backward()
  File "/job/my model.py", line 12, in forward
    raise ValueError("loss is NaN")
ValueError: loss is NaN
"""
GLOO = "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:61574"


def error(kind: str = "ValueError", message: str = "", trace: str = "") -> WorkerError:
    return WorkerError(type=kind, message=message, traceback=trace)


def test_place_is_the_innermost_frame():
    """The file and line where the exception was raised."""
    assert error(trace=TWO_FRAMES).place == "/job/my model.py:12"


def test_place_without_traceback_is_empty():
    """Error files of other programs may have no traceback."""
    assert error().place == ""


WATCHDOG = (
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "[PG ID 0 PG GUID 0(default_pg) Rank 2] Process group watchdog thread terminated with exception"
)


@pytest.mark.parametrize(
    ("code", "name"), [(0, ""), (1, ""), (-9, "SIGKILL"), (-15, "SIGTERM"), (-11, "SIGSEGV"), (-99, "signal 99")]
)
def test_signal_of_an_exit_code(code, name):
    """Negative exit codes are signals, as in `subprocess`; unknown signals have a number."""
    assert failure(exit_code=code).signal == name


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({"exit_code": 1, "error": error("ValueError", "loss is NaN\nat step 3")}, "raised ValueError: loss is NaN"),
        ({"exit_code": 1, "error": error("AssertionError")}, "raised AssertionError"),
        (raised("OSError", "no script a.py\nin /job", hopeless=True), "could not begin: no script a.py"),
        ({"exit_code": -9}, "was killed by SIGKILL"),
        ({"exit_code": -9, "evidence": "out of memory"}, "was killed by SIGKILL (out of memory)"),
        ({"exit_code": 3}, "exited with code 3"),
    ],
)
def test_short_description_of_a_failure(facts, what):
    """One line: the exception, else the signal, else the exit code."""
    assert failure(**facts).what == what


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("RuntimeError", GLOO),
        ("RuntimeError", "Connection reset by peer"),
        ("RuntimeError", "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)"),
        ("RuntimeError", "NCCL communicator was aborted on rank 1"),
        ("DistBackendError", "NCCL error: remote process exited or there was a network error"),
        ("DistNetworkError", "failed to recv, got 0 bytes"),
        ("DistStoreError", "wait timeout after 300000ms, keys: /default"),
        ("BrokenPipeError", "[Errno 32] Broken pipe"),
    ],
)
def test_errors_caused_by_a_dead_peer_are_collateral(kind, message):
    """Healthy ranks fail with these errors when another rank is gone."""
    assert failure(exit_code=1, error=error(kind, message)).is_collateral


@pytest.mark.parametrize(
    "facts",
    [
        raised("ValueError", "loss is NaN"),
        raised("OutOfMemoryError", "CUDA out of memory"),
        raised("DistNetworkError", "The server socket has failed to bind: EADDRINUSE, address already in use"),
        raised("DistBackendError", "NCCL error: ncclInvalidUsage. Duplicate GPU detected : rank 1 and rank 0"),
        {"exit_code": -9, "tail": "Connection reset by peer"},
        {"exit_code": 1, "tail": "Connection reset by peer"},
        {"exit_code": -6, "tail": "free(): invalid pointer"},
        {"exit_code": -6, "tail": f"what(): {WATCHDOG}: CUDA error: an illegal memory access was encountered"},
    ],
)
def test_other_failures_are_not_collateral(facts):
    """Kills never are, whatever the output says; nor are aborts for other reasons."""
    assert not failure(**facts).is_collateral


def test_watchdog_abort_is_collateral():
    """NCCL's watchdog aborts the process; only stderr gives the reason."""
    assert failure(exit_code=-6, tail="ProcessGroupNCCL watchdog thread terminated: timeout").is_collateral


def test_signatures_are_equal_at_the_same_place():
    """Type and place count; the message may contain a step or a loss."""
    one, two = (failure(**raised("ValueError", f"NaN at step {step}")) for step in (3, 4))
    elsewhere = failure(**raised("ValueError", "NaN at step 3", line=8))
    assert one.signature == two.signature == "ValueError at /job/train.py:7"
    assert elsewhere.signature != one.signature


def test_signatures_without_a_place_omit_numbers():
    """The message is used instead of the place."""
    one, two = (failure(exit_code=1, error=error("error", f"port {port} at 0x7f{port}")) for port in (41234, 41235))
    assert one.signature == two.signature == "raised error: port # at #"


def test_signatures_of_exit_codes_and_signals():
    """An exit code has its rank. A death by signal has no signature."""
    assert failure(exit_code=3, rank=5).signature == "rank 5 exited with code 3"
    assert failure(exit_code=-9).signature == ""


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (139, "exited with code 139 (as a shell says of SIGSEGV)"),
        (130, "exited with code 130 (as a shell says of SIGINT)"),
        (128, "exited with code 128"),
        (127, "exited with code 127"),
        (193, "exited with code 193"),
        (255, "exited with code 255"),
    ],
)
def test_shell_exit_codes_name_their_signal(code, what):
    """A shell exits with 128 plus the signal of its command. Other codes have no signal."""
    assert failure(exit_code=code).what == what


def test_shell_exit_code_with_evidence():
    """The kernel may have killed the command that the shell ran."""
    assert failure(exit_code=137, evidence="1 process").what == (
        "exited with code 137 (as a shell says of SIGKILL; 1 process)"
    )


def test_the_process_whose_death_killed_a_worker_is_named():
    """A fork server or a subreaper that somebody killed, say, and what else is known."""
    killed = failure(exit_code=-9, killed_with="the subreaper (process 7)", evidence="1 process")
    assert killed.what == "was killed by SIGKILL (together with the subreaper (process 7); 1 process)"


def test_signal_after_an_exception():
    """Both are described; the exception is the cause."""
    crash = failure(exit_code=-11, error=raised("ValueError", "NaN")["error"])
    assert crash.what == "raised ValueError: NaN, then was killed by SIGSEGV"
    assert crash.signature == "ValueError at /job/train.py:7"


def test_signal_counts_more_than_an_error_file():
    """The error file may be old, or of a child process."""
    left = replace(error("ImportError", "Connection reset by peer"), from_file=True)
    killed = failure(exit_code=-9, error=left, evidence="out of memory")
    assert killed.what == (
        "was killed by SIGKILL (out of memory); "
        "its error file says that it raised ImportError: Connection reset by peer"
    )
    assert killed.exception is None
    assert not killed.is_collateral
    assert killed.signature == ""
    assert hopeless(killed) == ""


def test_error_file_counts_for_an_exit_code():
    """Programs that are not started by raylaunch's own Python code report errors in this file."""
    left = replace(error("ImportError", "no module"), from_file=True)
    exited = failure(exit_code=1, error=left)
    assert exited.what == "raised ImportError: no module"
    assert hopeless(exited) == "a restart cannot mend ImportError"


HUNG = {"hung": "no step for 2.1 s, at train.py:33 in fetch", "hung_at": "/job/train.py:33"}


def test_hang_is_described_as_a_hang():
    """Not by the signal that ended the worker."""
    hang = failure(**HUNG)
    assert hang.what == "hung: no step for 2.1 s, at train.py:33 in fetch"
    assert hang.signature == "hung at /job/train.py:33"
    assert not hang.is_collateral
    assert replace(hang, hung_at="").signature == ""


def test_error_before_a_hang_is_ignored():
    """The worker lived on after it."""
    hang = failure(**HUNG, error=error("ValueError", "NaN"), tail="watchdog timeout")
    assert hang.exception is None
    assert hang.what == failure(**HUNG).what
    assert not replace(hang, exit_code=-6).is_collateral


def test_hang_in_a_collective_is_the_last_choice_for_the_cause():
    """Ranks in a collective may only wait. Equal hangs are named together."""
    waits = [failure(at=1.0, rank=rank, hung=f"no step for {rank}.0 s", waited=True) for rank in (0, 1)]
    hang = failure(at=2.0, rank=2, **HUNG)
    assert root_cause([*waits, hang]) == hang
    assert root_cause(waits) == waits[0]
    assert alike(waits, waits[0]) == (1,)


def test_hang_is_the_cause_of_later_failures():
    """Its time is that of the last sign of life, so failures since then come later."""
    hang = failure(at=10.0, rank=2, **HUNG)
    timeout = failure(at=11.0, rank=0, **raised("RuntimeError", "no answer within 1 s"))
    assert root_cause([timeout, hang]) == hang


def test_cause_is_the_first_failure_that_is_not_collateral():
    """Stopped workers are never the cause; a collateral failure only if there is no other."""
    stopped = failure(at=1.0, rank=0, exit_code=-15, stopped=True)
    collateral = failure(at=2.0, rank=1, **raised("RuntimeError", GLOO))
    cause = failure(at=3.0, rank=2, **raised("ValueError", "NaN"))
    later = failure(at=4.0, rank=3)
    assert root_cause([later, collateral, stopped, cause]) == cause
    assert root_cause([stopped, collateral]) == collateral
    assert root_cause([stopped]) is None
    assert root_cause([]) is None


def test_cause_at_equal_times_is_the_lowest_rank():
    """It does not depend on the order of the reports."""
    two = [failure(rank=4), failure(rank=3)]
    assert root_cause(two) == root_cause(two[::-1]) == two[1]


def test_consequences_are_grouped():
    """Texts that differ only in numbers are one group; the largest group comes first."""
    cause = failure("a", rank=0, **raised("ValueError", "NaN"))
    collateral = [failure("b", rank=rank, **raised("RuntimeError", f"closed by peer :{rank}")) for rank in (5, 4)]
    stopped = failure("b", rank=6, exit_code=-15, stopped=True)
    alone = failure("b", rank=1, exit_code=3)
    assert consequences([stopped, *collateral, cause, alone], cause) == [
        ("lost the connection to another rank (RuntimeError)", (4, 5)),
        ("exited with code 3", (1,)),
        ("stopped by raylaunch (SIGTERM)", (6,)),
    ]


def test_same_failure_on_other_ranks_is_no_consequence():
    """A missing module is missing for all ranks."""
    cause = failure("a", rank=0, **raised("ImportError", "no module, pid 4000"))
    others = [failure("b", rank=rank, **raised("ImportError", f"no module, pid 400{rank}")) for rank in (3, 2)]
    stopped = failure("b", rank=1, **raised("ImportError", "no module, pid 4001"), stopped=True)
    assert alike([*others, stopped, cause], cause) == (1, 2, 3)
    assert consequences([*others, stopped, cause], cause) == []


def hopeless(cause: Failure, *earlier: tuple[float, Failure], now: float = 100.0) -> str:
    return why_hopeless(cause, [(at, each.signature) for at, each in earlier], now)


def test_permanent_errors_are_hopeless():
    """Import and syntax errors, and errors that the worker marks as hopeless."""
    assert hopeless(failure(**raised("ModuleNotFoundError"))) == "a restart cannot mend ModuleNotFoundError"
    assert hopeless(failure(**raised("OSError", hopeless=True))) == "a restart cannot mend that"
    assert hopeless(failure(**raised("OSError"))) == ""


def test_third_equal_failure_is_hopeless():
    """Two equal failures before, within the window."""
    nan = failure(**raised("ValueError"))
    assert hopeless(nan, (60.0, nan), (80.0, nan)) == "the same failure 3 times within 60 s"
    assert hopeless(nan, (80.0, nan)) == ""
    assert SAME_FAILURE_WINDOW == 60.0


def test_old_and_other_failures_do_not_count():
    """The window slides, and the three failures must be consecutive."""
    nan, other = failure(**raised("ValueError")), failure(**raised("KeyError"))
    assert hopeless(nan, (39.0, nan), (80.0, nan)) == ""
    assert hopeless(nan, (60.0, nan), (70.0, nan), (80.0, other)) == ""


@pytest.mark.parametrize("cause", [failure(), failure(**raised("RuntimeError", GLOO))])
def test_kills_and_collateral_failures_are_never_the_same(cause):
    """They do not depend on the script."""
    assert hopeless(cause, (80.0, cause), (90.0, cause)) == ""


def test_failures_compare_by_value():
    assert failure() == failure()
    assert failure() != replace(failure(), attempt=2)


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({"rank": 3}, "SIGKILL"),
        ({"rank": 3, "exit_code": 7}, "exited with code 7"),
        (raised("ValueError", line=7), "ValueError at /job/train.py:7"),
        ({"hung": "no step for 9 s", "hung_at": "/job/train.py:9"}, "hung at /job/train.py:9"),
        ({"hung": "no step for 9 s"}, ""),
    ],
)
def test_kind_of_a_failure(facts, kind):
    """The kind does not contain the rank. It tells failures of a host from those of the script."""
    assert failure(**facts).kind == kind


def test_the_same_exception_of_a_stopped_rank():
    """It was raised before raylaunch ended the process, which takes longer than the exception."""
    cause = failure("a", rank=0, **raised("ValueError", "NaN"))
    killed = failure("b", rank=1, **(raised("ValueError", "NaN") | {"exit_code": -15}), stopped=True)
    other = failure("b", rank=2, **(raised("KeyError", "x") | {"exit_code": -9}), stopped=True)
    in_file = failure("b", rank=3, exit_code=-15, stopped=True)
    assert alike([cause, killed, other, in_file], cause) == (1,)
    assert consequences([cause, killed, other, in_file], cause) == [
        ("raised KeyError: x; stopped by raylaunch", (2,)),
        ("stopped by raylaunch (SIGTERM)", (3,)),
    ]


def test_a_long_traceback_keeps_its_frames():
    """A message of any length leaves the innermost frame."""
    trace = TWO_FRAMES + "x " * 100_000
    assert error(trace=capped_traceback(trace)).place == "/job/my model.py:12"
    assert len(capped_traceback(trace)) < 16_100
    assert capped_traceback(TWO_FRAMES) == TWO_FRAMES


def test_a_long_message_is_one_short_line():
    assert len(failure(**raised("ValueError", "long " * 1000)).what) < 500


def test_frames_of_exception_groups():
    """They have a margin."""
    trace = '  + Exception Group Traceback (most recent call last):\n  |   File "/job/a.py", line 7, in f\n'
    assert error(trace=trace).place == "/job/a.py:7"


def test_time_is_linear():
    """Workers may raise a text of any length and content."""

    def read(text: str) -> None:
        of_exception = failure(**(raised("RuntimeError", text) | {"error": error("RuntimeError", text, trace=text)}))
        of_abort = failure("b", exit_code=-6, tail=text)
        for each in (of_exception, of_abort):
            assert each.is_collateral in (True, False)
            assert each.signature + each.what + each.kind
            hints(each)
        consequences([of_exception, of_abort], of_exception)

    assert steep(read) == []
