"""Stacks as faulthandler writes them: the frames that count, and the groups of ranks with equal stacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from raylaunch.core.failures import stacks
from raylaunch.core.failures.stacks import (
    CHILD_STOPPED,
    IN_THE_KERNEL,
    NO_ANSWER,
    RUNNING_ON,
    STOPPED,
    Stack,
    StackGroup,
    grouped,
    main_thread,
    report,
    shortened,
)
from tests.core.adversarial import steep

TORCH = "/venv/lib/python3.11/site-packages/torch"
LOADER = f"{TORCH}/utils/data/dataloader.py"
BACKWARD = f"{TORCH}/autograd/graph.py:9 in _engine_run_backward"
LINE = "/job/train.py:33 in main"
WAITING = f"""Thread 0x00007f997fd916c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f99813beb80 (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 3030 in all_reduce
  File "{TORCH}/distributed/c10d_logger.py", line 83 in wrapper
  File "/job/train.py", line 41 in main
  File "/job/train.py", line 60 in <module>
  File "<frozen runpy>", line 88 in _run_code
  File "/code/raylaunch/worker/runtime/entry.py", line 90 in run_script
  File "/code/raylaunch/worker/runtime/boot.py", line 90 in run
  File "/code/raylaunch/node/forkserver/server.py", line 12 in add
"""
MAIN = (
    f"{TORCH}/distributed/distributed_c10d.py:3030 in all_reduce",
    f"{TORCH}/distributed/c10d_logger.py:83 in wrapper",
    "/job/train.py:41 in main",
    "/job/train.py:60 in <module>",
)
COMMIT = (
    "/venv/raylaunch/worker/state/commit_agreement.py:160 in _await",
    "/venv/raylaunch/worker/state/rank_commits.py:257 in wait_for_all",
    "/venv/raylaunch/worker/state/elastic_state.py:399 in _commit",
    "/venv/raylaunch/worker/state/elastic_state.py:330 in commit",
    "/job/train.py:88 in main",
)


def stack(rank: int, text: str = WAITING, state: str = "S") -> Stack:
    return Stack(rank=rank, state=state, text=text)


def written(*frames: str) -> str:
    """Return what faulthandler writes for a process with one thread."""
    lines = (frame.replace(":", '", line ') for frame in frames)
    return "\n".join(["Current thread 0x7f (most recent call first):", *(f'  File "{line}' for line in lines)])


def group(*frames: str, ranks: tuple[int, ...] = (1,), note: str = "") -> StackGroup:
    return StackGroup(ranks=ranks, frames=frames, note=note)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (MAIN, True),
        (
            (
                "/venv/raylaunch/worker/heartbeats/heartbeat_writer.py:271 in commit_to_restore",
                "/job/train.py:9 in main",
            ),
            True,
        ),
        (("/venv/raylaunch/worker/runtime/files_wait.py:27 in wait",), True),
        (("/job/train.py:41 in commit_to_restore",), False),
    ],
)
def test_what_waits_for_another_node(frames, expected):
    """Ranks in a collective, and those for which the agent gets something from there."""
    assert group(*frames).waits_for_node == expected


@pytest.mark.parametrize("runpy", ["<frozen runpy>", "/usr/lib/python3.10/runpy.py"])
def test_main_thread_is_the_last(runpy):
    """raylaunch's own frames below the script are omitted, and those of runpy, which Python 3.10 does not freeze."""
    assert main_thread(WAITING.replace("<frozen runpy>", runpy)) == MAIN


def test_main_thread_if_another_thread_handled_the_signal():
    text = WAITING.replace("Thread", "Current thread", 1)
    assert main_thread(text) == MAIN


def test_current_thread_counts_if_threads_are_omitted():
    """faulthandler writes a limited number of threads, and omits the oldest."""
    text = written("/job/train.py:3 in <module>") + "\n\nThread 0x8f (most recent call first):\n...\n"
    assert main_thread(text) == ("/job/train.py:3 in <module>",)
    assert main_thread(text.replace("Current thread", "Thread")) == ()


def test_threads_may_have_names():
    """Later versions of Python write the names of threads."""
    text = written("/job/train.py:3 in main").replace("0x7f", "0x7f [MainThread]")
    assert main_thread(text) == ("/job/train.py:3 in main",)


@pytest.mark.parametrize("text", ["", "Fatal error\n", "<no Python frame>"])
def test_text_without_stack_has_no_frames(text):
    assert main_thread(text) == ()


def test_worker_before_its_script_shows_all_frames():
    """If all frames are raylaunch's own, they are kept."""
    own = "/code/raylaunch/worker/runtime/boot.py:90 in run"
    assert main_thread(written(own)) == (own,)


def test_frames_of_the_self_check_are_kept():
    """The self-check runs in the place of a script."""
    frames = ("/code/raylaunch/worker/selfcheck/runner.py:9 in run", "/code/raylaunch/worker/runtime/boot.py:90 in run")
    assert main_thread(written(*frames)) == frames[:1]


def test_equal_stacks_are_one_group():
    """Other threads do not matter; ranks are sorted."""
    fetch = written("/job/train.py:33 in fetch")
    groups = grouped([stack(2), stack(0), stack(1, fetch)], (0, 1, 2))
    assert groups == [group(*MAIN, ranks=(0, 2)), group("/job/train.py:33 in fetch", ranks=(1,))]


@pytest.mark.parametrize(
    ("state", "note"), [("T", STOPPED), ("t", STOPPED), ("D", IN_THE_KERNEL), ("R", RUNNING_ON), ("S", NO_ANSWER)]
)
def test_note_of_a_worker_without_stack(state, note):
    """The note follows from the state of the process."""
    assert grouped([stack(0, "", state)], ()) == [group(ranks=(0,), note=note)]


def test_state_of_a_worker_with_stack_matters_only_if_stopped():
    """A waiting rank may run or sleep at that moment."""
    assert grouped([stack(0, state="R"), stack(1, state="S")], ()) == [group(*MAIN, ranks=(0, 1))]
    assert grouped([stack(0, state="T")], ()) == [group(*MAIN, ranks=(0,), note=STOPPED)]


def test_note_of_a_worker_with_a_stopped_child():
    """The worker probably waits for its child process."""
    waits = Stack(rank=1, state="S", text=WAITING, child_stopped=True)
    assert grouped([stack(0), waits], ()) == [group(*MAIN, ranks=(0,)), group(*MAIN, ranks=(1,), note=CHILD_STOPPED)]


def test_ranks_without_answer_are_a_group():
    assert grouped([stack(0)], (0, 5)) == [group(*MAIN, ranks=(0,)), group(ranks=(5,), note=NO_ANSWER)]


@pytest.mark.parametrize(
    ("frames", "doing", "place"),
    [
        (MAIN, "in all_reduce (train.py:41)", "/job/train.py:41"),
        (("/job/train.py:33 in fetch", "/job/train.py:60 in main"), "at train.py:33 in fetch", "/job/train.py:33"),
        (
            (f"{LOADER}:9 in _next_data", f"{LOADER}:7 in __next__", LINE),
            "in __next__ (train.py:33)",
            "/job/train.py:33",
        ),
        ((BACKWARD, f"{TORCH}/_tensor.py:7 in backward", LINE), "in backward (train.py:33)", "/job/train.py:33"),
        ((f"{TORCH}/nn/module.py:9 in _call", "/job/train.py:3 in main"), "in _call (train.py:3)", "/job/train.py:3"),
        ((f"{TORCH}/a.py:9 in run", f"{TORCH}/b.py:3 in main"), "at a.py:9 in run", f"{TORCH}/a.py:9"),
        (("/job/a in b.py:9 in run",), "at a in b.py:9 in run", "/job/a in b.py:9"),
        ((), "", ""),
    ],
)
def test_short_description_of_a_stack(frames, doing, place):
    """The line of the script, and the function it called there."""
    assert group(*frames).doing == doing
    assert group(*frames).place == place


def test_waits_for_other_ranks():
    """In a collective, or in a call that may contain one."""
    assert group(*MAIN).waits
    assert group(BACKWARD, *MAIN[2:]).waits
    assert not group(*MAIN[2:]).waits
    assert not group("/job/train.py:3 in hook", *MAIN).waits
    assert not group().waits


def test_loads_data():
    """Any frame of the stack may be in the data loader."""
    assert group("/usr/lib/python3.11/queue.py:9 in get", f"{LOADER}:7 in __next__").loads_data
    assert not group(*MAIN).loads_data


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (group(*MAIN, ranks=(0, 1, 2)), "3 ranks wait in all_reduce (train.py:41): 0-2"),
        (group(*MAIN, ranks=(7,)), "1 rank waits in all_reduce (train.py:41): 7"),
        (group("/job/train.py:33 in fetch", ranks=(3,)), "1 rank at train.py:33 in fetch: 3"),
        (group(*COMMIT, ranks=(0, 1)), "2 ranks wait in commit (train.py:88): 0-1"),
        (group(ranks=(3, 5), note=STOPPED), "2 ranks, stopped by a signal: 3, 5"),
        (group("/job/a.py:3 in f", note=STOPPED), "1 rank at a.py:3 in f, stopped by a signal: 1"),
    ],
)
def test_line_of_a_group(found, line):
    """The number of ranks, their place, and the ranks."""
    assert str(found) == line


def test_content_of_the_stacks_file():
    """First the groups with their frames, then the text of each worker."""
    stacks = [stack(1, "", "T"), stack(0, written("/job/train.py:3 in main"))]
    assert report(stacks, grouped(stacks, (0, 1))) == (
        "1 rank at train.py:3 in main: 0\n"
        "    /job/train.py:3 in main\n"
        "\n"
        "1 rank, stopped by a signal: 1\n"
        "\n"
        "--- rank 0, state S\n"
        "Current thread 0x7f (most recent call first):\n"
        '  File "/job/train.py", line 3 in main\n'
        "\n"
        "--- rank 1, state T\n"
        "did not answer\n"
        "\n"
    )


def test_text_without_the_callers_of_the_script_and_the_list_of_modules():
    """Frames below the script's and the names of modules are left out; frames of raylaunch that the script calls stay."""
    own = '  File "/code/raylaunch/worker/runtime/entry.py", line 87 in run_script'
    heartbeat = '  File "/code/raylaunch/worker/heartbeats/heartbeat_writer.py", line 9 in beat'
    script = ['  File "/job/train.py", line 3 in step', '  File "/job/train.py", line 6 in <module>']
    header = "Current thread 0x7f (most recent call first):"
    said = ["Fatal Python error: Segmentation fault", ""]
    threads = ["Thread 0x7e (most recent call first):", heartbeat, heartbeat, "", header, heartbeat, *script]
    modules = "Extension modules: numpy.linalg._umath_linalg, torch._C (total: 2)"
    assert shortened([*said, *threads, own, own, "", modules]) == [*said, *threads, ""]
    assert shortened(["Extension modulation", own]) == ["Extension modulation", own]
    assert shortened([]) == []


def test_stacks_file_has_no_callers_of_the_script() -> None:
    """All threads are there, each as far as the script."""
    assert "raylaunch/worker" in WAITING
    assert "raylaunch/worker" not in report([stack(0)], [])


def test_two_thousand_ranks_are_grouped():
    stacks = [stack(rank, WAITING if rank % 500 else written("/job/train.py:33 in fetch")) for rank in range(2000)]
    sizes = [len(each.ranks) for each in grouped(stacks, range(2000))]
    assert sizes == [4, 1996]


PACKAGE = Path(stacks.__file__).parents[2]
MODULES = sorted(
    path.relative_to(PACKAGE.parent).as_posix()
    for room in ("worker", "node")
    for path in (PACKAGE / room).rglob("*.py")
)


@pytest.mark.parametrize("module", MODULES)
def test_frames_below_the_script_are_omitted(module: str) -> None:
    """Those of all modules of `worker` and `node`, except the self-check, which runs in the place of a script."""
    frame = f"/code/{module}:7 in f"
    shown = (LINE, frame) if "/selfcheck/" in module else (LINE,)
    assert main_thread(written(LINE, frame)) == shown


def test_modules_include_subpackages() -> None:
    """Else the test above would have no cases."""
    assert "raylaunch/worker/runtime/boot.py" in MODULES
    assert "raylaunch/node/forkserver/server.py" in MODULES


def test_time_is_linear():
    """The text comes from a file that a worker writes."""

    def read(text: str) -> None:
        head = "Thread 0x1 (most recent call first):\n"
        for each in (text, head + text, head + "\n".join(f'  File "{text[:400]}", line 3 in f' for _ in range(20))):
            for found in stacks.grouped([stack(0, each)], [0]):
                assert str(found)
                assert (found.in_collective, found.in_backward, found.loads_data, found.place) is not None

    assert steep(read) == []


def test_a_line_that_is_none_of_faulthandler():
    assert stacks.main_thread(f'Thread 0x1 (most recent call first):\n  File "{"a/" * 2000}", line 3 in f') == ()
