"""Stacks as faulthandler writes them: whose frames count, and who does the same."""

from __future__ import annotations

import pytest

from raylaunch.core.stacks import (
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
)

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
  File "/code/raylaunch/worker/entry.py", line 90 in run_script
  File "/code/raylaunch/worker/boot.py", line 90 in run
  File "/code/raylaunch/node/brood.py", line 12 in add
"""
MAIN = (
    f"{TORCH}/distributed/distributed_c10d.py:3030 in all_reduce",
    f"{TORCH}/distributed/c10d_logger.py:83 in wrapper",
    "/job/train.py:41 in main",
    "/job/train.py:60 in <module>",
)


def stack(rank: int, text: str = WAITING, state: str = "S") -> Stack:
    return Stack(rank=rank, state=state, text=text)


def written(*frames: str) -> str:
    """What faulthandler writes of a process with one thread."""
    lines = (frame.replace(":", '", line ') for frame in frames)
    return "\n".join(["Current thread 0x7f (most recent call first):", *(f'  File "{line}' for line in lines)])


def group(*frames: str, ranks: tuple[int, ...] = (1,), note: str = "") -> StackGroup:
    return StackGroup(ranks=ranks, frames=frames, note=note)


def test_the_main_thread_is_the_last():
    """Without what is raylaunch's own below the script."""
    assert main_thread(WAITING) == MAIN


def test_a_signal_that_another_thread_took():
    """The main thread is the last all the same."""
    text = WAITING.replace("Thread", "Current thread", 1)
    assert main_thread(text) == MAIN


def test_of_too_many_threads_the_one_that_took_the_signal_must_do():
    """faulthandler leaves the oldest out."""
    text = written("/job/train.py:3 in <module>") + "\n\nThread 0x8f (most recent call first):\n...\n"
    assert main_thread(text) == ("/job/train.py:3 in <module>",)
    assert main_thread(text.replace("Current thread", "Thread")) == ()


def test_threads_may_have_names():
    """As those of later Pythons."""
    text = written("/job/train.py:3 in main").replace("0x7f", "0x7f [MainThread]")
    assert main_thread(text) == ("/job/train.py:3 in main",)


@pytest.mark.parametrize("text", ["", "Fatal error\n", "<no Python frame>"])
def test_no_stack_is_no_frames(text):
    """Whatever else was written."""
    assert main_thread(text) == ()


def test_a_worker_that_is_not_in_the_script_yet_shows_where_it_is():
    """All frames are raylaunch's own: then they are the answer."""
    own = "/code/raylaunch/worker/boot.py:90 in run"
    assert main_thread(written(own)) == (own,)


def test_the_self_check_is_a_script_like_others():
    """Its frames are not left out, nor are those of a script's own imports."""
    frames = ("/code/raylaunch/worker/selfcheck/course.py:9 in run", "/code/raylaunch/worker/boot.py:90 in run")
    assert main_thread(written(*frames)) == frames[:1]


def test_equal_stacks_are_one_group():
    """Whatever their other threads do; ranks in order."""
    fetch = written("/job/train.py:33 in fetch")
    groups = grouped([stack(2), stack(0), stack(1, fetch)], (0, 1, 2))
    assert groups == [group(*MAIN, ranks=(0, 2)), group("/job/train.py:33 in fetch", ranks=(1,))]


@pytest.mark.parametrize(
    ("state", "note"), [("T", STOPPED), ("t", STOPPED), ("D", IN_THE_KERNEL), ("R", RUNNING_ON), ("S", NO_ANSWER)]
)
def test_who_cannot_answer_says_something_too(state, note):
    """By the state of the process."""
    assert grouped([stack(0, "", state)], ()) == [group(ranks=(0,), note=note)]


def test_the_state_of_those_who_answered_does_not_matter():
    """A waiting rank may run or sleep at that moment; one that was stopped after its answer is still stopped."""
    assert grouped([stack(0, state="R"), stack(1, state="S")], ()) == [group(*MAIN, ranks=(0, 1))]
    assert grouped([stack(0, state="T")], ()) == [group(*MAIN, ranks=(0,), note=STOPPED)]


def test_who_has_started_a_process_that_is_stopped_says_so():
    """It waits for that, most likely."""
    waits = Stack(rank=1, state="S", text=WAITING, child_stopped=True)
    assert grouped([stack(0), waits], ()) == [group(*MAIN, ranks=(0,)), group(*MAIN, ranks=(1,), note=CHILD_STOPPED)]


def test_ranks_of_nodes_that_did_not_answer_are_there():
    """Nothing is known of them."""
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
def test_what_a_worker_does_in_a_few_words(frames, doing, place):
    """The line of the script, and what it called there."""
    assert group(*frames).doing == doing
    assert group(*frames).place == place


def test_who_waits_for_others():
    """In a collective, or where one may be inside."""
    assert group(*MAIN).waits
    assert group(BACKWARD, *MAIN[2:]).waits
    assert not group(*MAIN[2:]).waits
    assert not group("/job/train.py:3 in hook", *MAIN).waits
    assert not group().waits


def test_who_loads_data():
    """Anywhere in the stack."""
    assert group("/usr/lib/python3.11/queue.py:9 in get", f"{LOADER}:7 in __next__").loads_data
    assert not group(*MAIN).loads_data


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (group(*MAIN, ranks=(0, 1, 2)), "3 ranks wait in all_reduce (train.py:41): 0-2"),
        (group(*MAIN, ranks=(7,)), "1 rank waits in all_reduce (train.py:41): 7"),
        (group("/job/train.py:33 in fetch", ranks=(3,)), "1 rank at train.py:33 in fetch: 3"),
        (group(ranks=(3, 5), note=STOPPED), "2 ranks, stopped by a signal: 3, 5"),
        (group("/job/a.py:3 in f", note=STOPPED), "1 rank at a.py:3 in f, stopped by a signal: 1"),
    ],
)
def test_a_group_in_a_line(found, line):
    """How many, where, and who."""
    assert str(found) == line


def test_the_file_of_stacks():
    """Groups with their frames first, then all that each worker wrote."""
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


def test_a_thousand_ranks_are_grouped_by_what_they_do():
    """Each with a stack of its own depth and threads."""
    stacks = [stack(rank, WAITING if rank % 500 else written("/job/train.py:33 in fetch")) for rank in range(2000)]
    sizes = [len(each.ranks) for each in grouped(stacks, range(2000))]
    assert sizes == [4, 1996]
