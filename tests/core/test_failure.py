"""What failures mean: the words for them, which is the cause, what followed, and when a restart is no use."""

from __future__ import annotations

from dataclasses import replace

import pytest
from story import failure, raised

from raylaunch.core.failure import (
    SAME_FAILURE_LIMIT,
    SAME_FAILURE_WINDOW,
    Failure,
    WorkerError,
    alike,
    consequences,
    root_cause,
    why_hopeless,
)

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


def test_the_place_is_the_innermost_frame():
    """File and line where it was raised, not where the program began."""
    assert error(trace=TWO_FRAMES).place == "/job/my model.py:12"


def test_no_traceback_is_no_place():
    """An error file of somebody else's may have none."""
    assert error().place == ""


@pytest.mark.parametrize(
    ("code", "name"), [(0, ""), (1, ""), (-9, "SIGKILL"), (-15, "SIGTERM"), (-11, "SIGSEGV"), (-99, "signal 99")]
)
def test_exit_codes_name_their_signal(code, name):
    """Negative ones are signals, as in `subprocess`; those without a name keep their number."""
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
def test_what_happened_in_a_few_words(facts, what):
    """An exception before a signal before an exit code; one line only."""
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
def test_echoes_of_a_dead_peer_are_collateral(kind, message):
    """This is what healthy ranks say when another one is gone."""
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
    ],
)
def test_other_failures_are_their_own(facts):
    """A kill is one whatever was said before it, and so is an abort for reasons of its own."""
    assert not failure(**facts).is_collateral


def test_the_abort_of_a_watchdog_is_collateral():
    """NCCL's watchdog aborts the process; only its stderr says why."""
    assert failure(exit_code=-6, tail="ProcessGroupNCCL watchdog thread terminated: timeout").is_collateral


def test_signatures_are_equal_at_the_same_place():
    """Type and place count; the message may hold a step or a loss."""
    one, two = (failure(**raised("ValueError", f"NaN at step {step}")) for step in (3, 4))
    elsewhere = failure(**raised("ValueError", "NaN at step 3", line=8))
    assert one.signature == two.signature == "ValueError at /job/train.py:7"
    assert elsewhere.signature != one.signature


def test_signatures_without_a_place_blank_numbers():
    """Then the message must do."""
    one, two = (failure(exit_code=1, error=error("error", f"port {port} at 0x7f{port}")) for port in (41234, 41235))
    assert one.signature == two.signature == "raised error: port # at #"


def test_signatures_of_exits_and_deaths():
    """An exit code counts with its rank. A death by signal says nothing of the program."""
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
def test_exit_codes_of_a_shell_name_the_signal_it_means(code, what):
    """128 and a number: how a shell passes on the end of its command. Other codes keep their number alone."""
    assert failure(exit_code=code).what == what


def test_the_signal_of_a_shell_keeps_its_evidence():
    """The command that a shell ran may be what the kernel killed."""
    assert failure(exit_code=137, evidence="1 process").what == (
        "exited with code 137 (as a shell says of SIGKILL; 1 process)"
    )


def test_a_crash_after_an_exception_is_told_with_it():
    """The exception ended the program, the signal its exit: both are facts, the first is the cause."""
    crash = failure(exit_code=-11, error=raised("ValueError", "NaN")["error"])
    assert crash.what == "raised ValueError: NaN, then was killed by SIGSEGV"
    assert crash.signature == "ValueError at /job/train.py:7"


def test_an_error_file_does_not_hide_a_signal():
    """What is only in a file may be old, or of a child of the worker's; the worker was killed."""
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


def test_an_error_file_of_a_worker_that_exits_is_believed():
    """A program that is not started by Python code of ours leaves its words there."""
    left = replace(error("ImportError", "no module"), from_file=True)
    exited = failure(exit_code=1, error=left)
    assert exited.what == "raised ImportError: no module"
    assert hopeless(exited) == "a restart cannot mend ImportError"


HUNG = {"hung": "no step for 2.1 s, at train.py:33 in fetch", "hung_at": "/job/train.py:33"}


def test_a_hang_is_told_as_one():
    """Not by the signal that ended it: by what it did, and since when."""
    silent = failure(**HUNG)
    assert silent.what == "hung: no step for 2.1 s, at train.py:33 in fetch"
    assert silent.signature == "hung at /job/train.py:33"
    assert not silent.is_collateral
    assert replace(silent, hung_at="").signature == ""


def test_a_hang_hides_no_error_that_a_file_tells_of():
    """But whatever it wrote or raised before, it lived on."""
    silent = failure(**HUNG, error=error("ValueError", "NaN"), tail="watchdog timeout")
    assert silent.exception is None
    assert silent.what == failure(**HUNG).what
    assert not replace(silent, exit_code=-6).is_collateral


def test_who_hung_in_a_collective_is_the_cause_only_for_want_of_better():
    """It does what all do that wait; equal ones are named together."""
    waits = [failure(at=1.0, rank=rank, hung=f"no step for {rank}.0 s", waited=True) for rank in (0, 1)]
    silent = failure(at=2.0, rank=2, **HUNG)
    assert root_cause([*waits, silent]) == silent
    assert root_cause(waits) == waits[0]
    assert alike(waits, waits[0]) == (1,)


def test_a_hang_is_the_cause_of_what_came_in_its_silence():
    """Its time is that of its last sign of life: whatever others raised since may follow from it."""
    silent = failure(at=10.0, rank=2, **HUNG)
    timeout = failure(at=11.0, rank=0, **raised("RuntimeError", "no answer within 1 s"))
    assert root_cause([timeout, silent]) == silent


def test_the_cause_is_the_first_of_its_own():
    """Never one that we stopped, an echo only for want of better, else by time."""
    ours = failure(at=1.0, rank=0, exit_code=-15, stopped=True)
    echo = failure(at=2.0, rank=1, **raised("RuntimeError", GLOO))
    cause = failure(at=3.0, rank=2, **raised("ValueError", "NaN"))
    later = failure(at=4.0, rank=3)
    assert root_cause([later, echo, ours, cause]) == cause
    assert root_cause([ours, echo]) == echo
    assert root_cause([ours]) is None
    assert root_cause([]) is None


def test_the_cause_at_equal_times_is_the_lowest_rank():
    """So that the answer does not hang on the order in which nodes are heard."""
    two = [failure(rank=4), failure(rank=3)]
    assert root_cause(two) == root_cause(two[::-1]) == two[1]


def test_what_followed_is_grouped():
    """Equal texts but for numbers are one group; the commonest comes first, the cause not at all."""
    cause = failure("a", rank=0, **raised("ValueError", "NaN"))
    echoes = [failure("b", rank=rank, **raised("RuntimeError", f"closed by peer :{rank}")) for rank in (5, 4)]
    ours = failure("b", rank=6, exit_code=-15, stopped=True)
    alone = failure("b", rank=1, exit_code=3)
    assert consequences([ours, *echoes, cause, alone], cause) == [
        ("raised RuntimeError: closed by peer :5", (4, 5)),
        ("exited with code 3", (1,)),
        ("stopped by raylaunch (SIGTERM)", (6,)),
    ]


def test_the_same_elsewhere_is_no_consequence():
    """A missing module is missing for all ranks; none of them is at fault for another."""
    cause = failure("a", rank=0, **raised("ImportError", "no module, pid 4000"))
    others = [failure("b", rank=rank, **raised("ImportError", f"no module, pid 400{rank}")) for rank in (3, 2)]
    ours = failure("b", rank=1, **raised("ImportError", "no module, pid 4001"), stopped=True)
    assert alike([*others, ours, cause], cause) == (2, 3)
    assert consequences([*others, ours, cause], cause) == [("stopped by raylaunch (exit code 1)", (1,))]


def hopeless(cause: Failure, *earlier: tuple[float, Failure], now: float = 100.0) -> str:
    return why_hopeless(cause, [(at, each.signature) for at, each in earlier], now)


def test_what_cannot_begin_is_hopeless():
    """Import and syntax errors by their type, all else by the word of the worker."""
    assert hopeless(failure(**raised("ModuleNotFoundError"))) == "a restart cannot mend ModuleNotFoundError"
    assert hopeless(failure(**raised("OSError", hopeless=True))) == "a restart cannot mend that"
    assert hopeless(failure(**raised("OSError"))) == ""


def test_the_same_three_times_is_hopeless():
    """Two before, within the window, make this the third."""
    nan = failure(**raised("ValueError"))
    assert hopeless(nan, (60.0, nan), (80.0, nan)) == "the same failure 3 times within 60 s"
    assert hopeless(nan, (80.0, nan)) == ""
    assert (SAME_FAILURE_LIMIT, SAME_FAILURE_WINDOW) == (3, 60.0)


def test_old_ones_and_others_do_not_count():
    """The window slides, and the three must be in a row."""
    nan, other = failure(**raised("ValueError")), failure(**raised("KeyError"))
    assert hopeless(nan, (39.0, nan), (80.0, nan)) == ""
    assert hopeless(nan, (60.0, nan), (70.0, nan), (80.0, other)) == ""


@pytest.mark.parametrize("cause", [failure(), failure(**raised("RuntimeError", GLOO))])
def test_signals_and_echoes_are_never_the_same(cause):
    """They tell of the world around the program, and the next may be another."""
    assert hopeless(cause, (80.0, cause), (90.0, cause)) == ""


def test_failures_are_values():
    """They compare by what they say, as the log needs it."""
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
def test_what_is_of_one_kind_on_whichever_rank(facts, kind):
    """By which a host's own failures are told from those of the script."""
    assert failure(**facts).kind == kind
