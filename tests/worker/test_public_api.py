"""`raylaunch.worker`, the API for scripts, in a launch and outside of one."""

import fcntl
import os
import signal
import sys
import time

import pytest

from raylaunch import worker
from raylaunch.worker.heartbeats import shared_page
from tests.worker.alone import ATTEMPT, until

pytestmark = pytest.mark.timeout(300)

ALL = """
from raylaunch import worker
print(worker.should_checkpoint(0))
worker.checkpointed(0)
worker.heartbeat()
with worker.section("validation"):
    print(worker.context().launched)
"""


def fake_page(alone_worker, size, seals):
    """Return the path of a memory file that has the page's name."""
    fd = os.memfd_create("raylaunch-page", os.MFD_ALLOW_SEALING)
    alone_worker.fds.append(fd)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return f"/proc/{os.getpid()}/fd/{fd}:900"


@pytest.mark.parametrize("local_rank", ["", "0", "-1", "x", "1000", "99999999999"])
@pytest.mark.parametrize("path", ["", "/proc/999999999/fd/3", "/etc/passwd", "/proc/self/fd/0", ":"])
def test_outside_a_launch_nothing_happens(monkeypatch, local_rank, path):
    worker.heartbeat_writer.release()
    monkeypatch.setenv(shared_page.PAGE_VARIABLE, f"{path}:{local_rank}" if path else "")
    monkeypatch.delenv("RAYLAUNCH_ATTEMPT", raising=False)
    assert worker.should_checkpoint(0) is False
    worker.checkpointed(0)
    worker.heartbeat()
    with worker.section("validation"):
        pass
    assert worker.heartbeat_writer.current_writer() is None
    worker.heartbeat_writer.release()


@pytest.mark.parametrize(("size", "seals"), [(100, 0), (shared_page.PAGE_BYTES, fcntl.F_SEAL_WRITE)])
def test_a_page_that_is_too_short_or_read_only_is_ignored(alone_worker, size, seals):
    env = alone_worker.shared.env() | {shared_page.PAGE_VARIABLE: fake_page(alone_worker, size, seals)}
    assert alone_worker.python(ALL, env=env).printed() == ["False", "True"]


@pytest.mark.parametrize("local_rank", [-1, 1000, 1 << 70])
def test_a_local_rank_without_a_slot_is_ignored(alone_worker, local_rank):
    assert alone_worker.python(ALL, env=alone_worker.shared.env(local_rank)).printed() == ["False", "True"]
    assert alone_worker.shared.slot() == {}


def test_a_process_of_an_earlier_attempt_writes_nothing(alone_worker):
    env = alone_worker.shared.env() | {"RAYLAUNCH_ATTEMPT": str(ATTEMPT - 1)}
    assert alone_worker.python(ALL, env=env).printed() == ["False", "True"]
    assert alone_worker.shared.slot() == {}


def test_importing_it_imports_no_large_module(alone_worker):
    heavy = ("torch", "ray", "omegaconf", "yaml", "cloudpickle", "numpy", "asyncio", "socket", "subprocess")
    text = f"import sys, raylaunch.worker; print(*(name for name in {heavy} if name in sys.modules))"
    assert alone_worker.python(text).printed() == []


# Context.


def test_context_in_a_launch(alone_worker):
    ranks = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    more = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_MAX_RESTARTS": "9"}
    more["RAYLAUNCH_RUN_DIR"] = "/runs/a/1"
    env = alone_worker.shared.env() | ranks | more | {"TORCHELASTIC_RESTART_COUNT": "2"}
    run = alone_worker.python("from raylaunch import worker; print(repr(worker.context()).replace(' ', ''))", env=env)
    wanted = worker.Context(
        launched=True,
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        node_rank=1,
        nnodes=2,
        attempt=ATTEMPT,
        restart_count=2,
        max_restarts=9,
        run_id="run",
        run_dir="/runs/a/1",
    )
    assert run.printed() == [repr(wanted).replace(" ", "")]


def test_context_outside_of_one(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("RAYLAUNCH_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", "first")
    found = worker.context()
    assert (found.launched, found.rank, found.world_size, found.attempt) == (False, 0, 1, 0)
    assert (found.run_id, found.run_dir) == ("", "")


# What naming `State` and `elastic` sets.


@pytest.mark.parametrize(
    ("names", "given", "found"),
    [
        ("heartbeat", "1", "1"),
        ("State", "1", "3"),
        ("State", "0", "0"),
        ("State, elastic", "1", "0"),
        ("elastic, State", "1", "0"),
    ],
)
def test_torch_aborts_no_communicator_by_itself_before_a_script_with_state_ends(alone_worker, names, given, found):
    """torch's default; 1 is torchrun's. With `elastic` torch does not even end the process."""
    env = alone_worker.shared.env() | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": given, "RAYLAUNCH_SURVIVORS": "x"}
    text = f"import os; from raylaunch.worker import {names}; print(os.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING'])"
    assert alone_worker.python(text, env=env).printed() == [found]


# Checkpoints.


def test_no_checkpoint_is_requested(alone_worker):
    run = alone_worker.python("from raylaunch.worker import *\nprint(*(should_checkpoint(step) for step in range(3)))")
    assert run.printed() == ["False"] * 3
    assert alone_worker.shared.slot() == {"PROGRESS": 3, "LAST_STEP": 3, "POLLED_STEP": 3}


def test_should_checkpoint_is_true_from_the_committed_step_on(alone_worker):
    alone_worker.shared.request_save(3)
    run = alone_worker.python("from raylaunch.worker import *\nprint(*(should_checkpoint(step) for step in range(5)))")
    assert run.printed() == ["False", "False", "True", "True", "True"]
    assert alone_worker.shared.slot() == {"PROGRESS": 5, "LAST_STEP": 5, "POLLED_STEP": 5, "BUSY": 1}


def test_at_a_proposed_step_it_waits_for_the_commit(alone_worker):
    """It returns False if a later step is proposed instead, because some rank had passed this one."""
    shared = alone_worker.shared
    shared.propose(3)
    text = "from raylaunch.worker import *\nprint(*(should_checkpoint(step) for step in range(5)))"
    run = alone_worker.python(text)
    shared.until("POLLED_STEP", 3)
    time.sleep(0.05)
    assert (shared["POLLED_STEP"], shared["BUSY"]) == (3, 0)
    shared.propose(4)
    shared.until("POLLED_STEP", 4)
    shared.commit()
    assert run.printed() == ["False", "False", "False", "True", "True"]


WAITS = """
import signal, sys, time
from raylaunch import worker

{before}
for step in range(100):
    if worker.should_checkpoint(step):
        worker.checkpointed(step)
        print("returned", step)
        break
print("end")
"""


@pytest.fixture
def waiting(alone_worker):
    """Returns a function that starts a script, and returns when it has saved step 4 and waits for SIGTERM."""

    def start(before=""):
        alone_worker.shared.request_save(5)
        run = alone_worker.python(WAITS.format(before=before))
        alone_worker.shared.until("WAITING_FOR_STOP", 1)
        found = alone_worker.shared.slot()
        assert (found["SAVED_STEP"], found["LAST_STEP"], found.get("BUSY", 0)) == (5, 5, 0)
        return run

    return start


def test_a_worker_that_has_saved_waits_for_sigterm(waiting):
    run = waiting()
    os.kill(run.pid, signal.SIGTERM)
    assert run.code() == -signal.SIGTERM
    assert run.out.read_text() == ""


def test_an_exception_of_a_handler_is_raised(waiting, alone_worker):
    run = waiting("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))")
    os.kill(run.pid, signal.SIGTERM)
    assert run.code() == 7
    assert run.out.read_text() == ""
    assert alone_worker.shared["WAITING_FOR_STOP"] == 0


def test_sigint_raises_keyboard_interrupt(waiting):
    run = waiting()
    os.kill(run.pid, signal.SIGINT)
    assert run.code() == -signal.SIGINT
    assert "KeyboardInterrupt" in run.err.read_text()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"])
def test_the_script_goes_on_after_a_handler_that_returns(waiting, name):
    """The script's handler is installed again then."""
    handler = f"told = lambda *_: print('told')\nsignal.signal(signal.{name}, told)\n"
    run = waiting(handler + f"import atexit; atexit.register(lambda: print(signal.getsignal(signal.{name}) is told))")
    os.kill(run.pid, signal.Signals[name])
    assert run.printed() == ["told", "returned", "4", "end", "True"]


def test_a_handler_that_the_handler_installs_stays(waiting):
    handler = (
        "def told(*_): signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.signal(signal.SIGTERM, told)\n"
        "import atexit; atexit.register(lambda: print(signal.getsignal(signal.SIGTERM).name))"
    )
    run = waiting(handler)
    os.kill(run.pid, signal.SIGTERM)
    assert run.printed() == ["returned", "4", "end", "SIG_IGN"]


def test_the_script_does_not_go_on_after_another_signal(waiting):
    """One example is SIGCHLD of a data loader's process."""
    run = waiting("signal.signal(signal.SIGCHLD, lambda *_: print('child', flush=True))")
    os.kill(run.pid, signal.SIGCHLD)
    os.kill(run.pid, signal.SIGTERM)
    assert run.code() == -signal.SIGTERM
    assert "returned" not in run.out.read_text()


def test_checkpointed_waits_in_another_thread_too(alone_worker):
    """No handler can be wrapped there."""
    alone_worker.shared.request_save(5)
    run = alone_worker.python("""
        import os, signal, threading
        from raylaunch import worker
        signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
        threading.Thread(target=worker.checkpointed, args=(4,)).start()
    """)
    alone_worker.shared.until("WAITING_FOR_STOP", 1)
    os.kill(run.pid, signal.SIGTERM)
    assert run.code() == 9


@pytest.mark.parametrize("end", ["", "sys.exit()", "sys.exit(0)"])
def test_a_script_that_saves_and_exits_waits_too(alone_worker, end):
    """Exit code 0 would end the job."""
    alone_worker.shared.request_save(5)
    run = alone_worker.worker(
        f"import sys\nfrom raylaunch import worker\nif worker.should_checkpoint(4):\n    {end or 'pass'}"
    )
    alone_worker.shared.until("WAITING_FOR_STOP", 1)
    assert alone_worker.shared["SAVED_STEP"] == 5
    os.kill(run.pid, signal.SIGTERM)
    assert run.code() == -signal.SIGTERM


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("worker.checkpointed(4)\nsys.exit(0)", 0)])
def test_a_script_that_fails_or_was_signalled_exits(alone_worker, end, code):
    alone_worker.shared.request_save(5)
    text = "import signal, sys\nfrom raylaunch import worker\nsignal.signal(signal.SIGTERM, lambda *_: None)\n"
    run = alone_worker.worker(f"{text}worker.should_checkpoint(4)\n{end}")
    if code == 0:
        alone_worker.shared.until("WAITING_FOR_STOP", 1)
        os.kill(run.pid, signal.SIGTERM)
    assert run.code() == code


def test_the_wait_ends_when_the_request_is_withdrawn(waiting, alone_worker):
    run = waiting()
    alone_worker.shared.request_save(0)
    assert run.printed() == ["returned", "4", "end"]
    assert alone_worker.shared["WAITING_FOR_STOP"] == 0


def test_the_wait_ends_when_the_lease_expires(waiting, alone_worker):
    run = waiting()
    alone_worker.shared.expire_lease()
    assert run.code() == -signal.SIGKILL


@pytest.mark.parametrize("call", ["should_checkpoint(0)", "heartbeat()", "checkpointed(0)", "section('x').__enter__()"])
def test_a_worker_dies_at_any_call_after_the_lease_expired(alone_worker, call):
    alone_worker.shared.expire_lease()
    run = alone_worker.python(f"from raylaunch.worker import *\n{call}\nprint('on')")
    assert run.code() == -signal.SIGKILL
    assert (alone_worker.shared["PROGRESS"], alone_worker.shared["POLLED_STEP"], run.out.read_text()) == (0, 0, "")


def test_a_checkpoint_that_was_not_requested_is_recorded(alone_worker):
    run = alone_worker.python("from raylaunch.worker import *\ncheckpointed(9)\nprint('on')")
    assert run.printed() == ["on"]
    assert alone_worker.shared.slot() == {"SAVED_STEP": 10}


def test_an_earlier_checkpoint_than_the_requested_one_does_not_wait(alone_worker):
    alone_worker.shared.request_save(11)
    run = alone_worker.python("from raylaunch.worker import *\ncheckpointed(9)\nprint('on')")
    assert run.printed() == ["on"]


def test_a_worker_is_busy_once_while_it_saves(alone_worker):
    alone_worker.shared.request_save(1)
    run = alone_worker.python("""
        from raylaunch.worker import *
        should_checkpoint(0), should_checkpoint(1)
    """)
    run.printed()
    assert alone_worker.shared["BUSY"] == 1


def test_steps_may_go_backwards(alone_worker):
    text = "from raylaunch.worker import *\nprint(*(should_checkpoint(step) for step in (5, 3, 1 << 61, 0)))"
    assert alone_worker.python(text).printed() == ["False"] * 4
    assert alone_worker.shared.slot() == {"PROGRESS": 4, "LAST_STEP": 1, "POLLED_STEP": 1}


class Index:
    """An integer as NumPy has them."""

    def __index__(self):
        return 4


@pytest.mark.parametrize("call", [worker.should_checkpoint, worker.checkpointed])
def test_arguments_that_are_no_step(call):
    for step in ("4", 4.0, None, True, [4]):
        with pytest.raises(TypeError, match="`step` is the number of the step that was just done"):
            call(step)
    for step in (-1, 1 << 62, 1 << 100):
        with pytest.raises(ValueError, match="from 0 on"):
            call(step)
    assert not call(Index())


# Heartbeats and sections.


def test_heartbeats_are_progress(alone_worker):
    run = alone_worker.python("from raylaunch.worker import *\nfor _ in range(5): heartbeat()")
    run.printed()
    assert alone_worker.shared.slot() == {"PROGRESS": 5}
    assert alone_worker.shared["ALIVE_AT"] > 0


SECTIONS = """
import sys
from raylaunch.worker import *

def now(word):
    print(word, flush=True)
    sys.stdin.readline()

with section("outer"):
    try:
        with section("inner"):
            now("2")
            raise ValueError
    except ValueError:
        now("1")

@section("whole")
def validate():
    now("1")

validate()
now("0")
"""


def test_sections_are_counted(alone_worker):
    """Nested sections, one that ends by an exception, and a decorated function."""
    readable, writable = os.pipe()
    path = alone_worker.script(SECTIONS)
    run = alone_worker.python(
        SECTIONS, command=("sh", "-c", f"exec {sys.executable} {path} < /proc/{os.getpid()}/fd/{readable}")
    )
    try:
        for number in range(4):
            seen = ("2", "1", "1", "0")[number]
            wait_for_lines(run, number + 1)
            assert run.out.read_text().split()[-1] == seen
            assert alone_worker.shared["BUSY"] == int(seen)
            os.write(writable, b"\n")
        assert run.code() == 0
    finally:
        os.close(readable)
        os.close(writable)


def wait_for_lines(run, count):
    until(lambda: len(run.out.read_text().split()) == count)


def test_a_section_without_its_name():
    with pytest.raises(TypeError, match="takes a name"):
        worker.section(lambda: None)


# Which process owns the slot.


def test_a_script_behind_a_shell(alone_worker):
    path = alone_worker.script("from raylaunch import worker; worker.heartbeat()")
    alone_worker.python(
        "from raylaunch import worker; worker.heartbeat()",
        command=("bash", "-c", f"true; {sys.executable} {path}; true"),
    ).printed()
    assert alone_worker.shared.slot() == {"PROGRESS": 1}


def test_one_program_after_another(alone_worker):
    """The second goes on with the first one's count, and is not in the section in which the first was killed."""
    text = """
        import os, sys
        from raylaunch import worker
        worker.heartbeat()
        if sys.argv[1] == "first":
            worker.section("x").__enter__()
            os.kill(os.getpid(), 9)
        print(sys.argv[1])
    """
    program = f"{sys.executable} {alone_worker.script(text)}"
    run = alone_worker.python(text, command=("bash", "-c", f"{program} first; {program} second"))
    assert run.printed() == ["second"]
    assert alone_worker.shared.slot() == {"PROGRESS": 2}


def test_a_program_still_owns_the_slot_after_exec(alone_worker):
    text = "import os, sys; from raylaunch import worker; worker.heartbeat()\nif len(sys.argv) < 3: os.execv(sys.executable, [sys.executable, *sys.argv, *'abc'])"
    run = alone_worker.python(text)
    run.printed()
    assert alone_worker.shared["OWNER_PID"] == run.pid
    assert alone_worker.shared.slot() == {"PROGRESS": 2}


CHILD = """
import multiprocessing, os, subprocess, sys
from raylaunch import worker

def beats():
    for _ in range(10):
        worker.heartbeat()

if __name__ == "__main__":
    {first}
    for method in ("fork", "spawn", "forkserver"):
        child = multiprocessing.get_context(method).Process(target=beats)
        child.start()
        child.join()
        assert child.exitcode == 0
    {last}
    subprocess.run([sys.executable, "-c", "from raylaunch import worker; worker.heartbeat()"], check=True)
    print("done")
"""


@pytest.mark.parametrize(("first", "last"), [("worker.heartbeat()", "pass"), ("pass", "worker.heartbeat()")])
def test_child_processes_write_nothing(alone_worker, first, last):
    """Not even those that start before their parent uses the API."""
    assert alone_worker.python(CHILD.format(first=first, last=last)).printed() == ["done"]
    assert alone_worker.shared.slot() == {"PROGRESS": 1}


def test_the_optimizer_of_a_program_that_uses_the_api_is_counted(alone_worker):
    """It imports the optimizers after it has used the API. (The rest of torch is there: importing that takes seconds.)"""
    text = """
        import sys, torch
        for name in [name for name in sys.modules if name.startswith("torch.optim")]:
            del sys.modules[name]
        from raylaunch import worker
        worker.heartbeat()
        import torch.optim
        parameter = torch.nn.Parameter(torch.zeros(1))
        parameter.grad = torch.ones(1)
        optimizer = torch.optim.Adam([parameter])
        for step in range(3):
            optimizer.step()
            assert not worker.should_checkpoint(100 + step)
        optimizer.step()
    """
    alone_worker.script(text, "uses_the_api.py")
    alone_worker.module("uses_the_api", env=alone_worker.shared.env()).printed()
    assert alone_worker.shared.slot() == {"PROGRESS": 5, "LAST_STEP": 103, "POLLED_STEP": 103}


def test_a_process_that_is_no_rank_of_a_group_has_no_dataset() -> None:
    with pytest.raises(LookupError, match="no dataset 'train': `datasets` of its `WorkerGroup` has none"):
        worker.dataset_shard("train")
