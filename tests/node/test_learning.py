"""`preload: auto`: what the script imports is there when it is started again, and it cannot tell the difference."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylaunch.core.events import WorkersExited, WorkersStarted
from raylaunch.node.messages import Learned, Ready
from tests.node.harness import (
    Ears,
    Node,
    basic_env,
    is_listening,
    marked,
    send,
    until,
    wait_gone,
)

pytestmark = pytest.mark.timeout(300)

INSTALLED = {
    "heavy": """
        import os, time
        began = time.process_time()
        while time.process_time() < began + 0.2:
            pass
        mode = os.environ.get("MODE")
        os.environ["SET_BY_HEAVY"] = "1"
    """,
    "helper": "",
    "asks_helper": "try:\n    import helper\nexcept ImportError:\n    pass",
    "wants_thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,), daemon=True).start()",
    "like_jemalloc": """
        import ctypes, threading, time
        def sweep():
            ctypes.CDLL(None).prctl(15, b"jemalloc_bg_thd", 0, 0, 0)
            named.set()
            time.sleep(3600)
        named = threading.Event()
        threading.Thread(target=sweep, daemon=True).start()
        named.wait()
    """,
    "wants_socket": "import socket\nkept = socket.socket()",
    "wants_signal": "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: None)",
    "wants_process": "import subprocess\nkept = subprocess.Popen(['sleep', '3600'])",
    "wants_rank": "import os\nrank = os.environ.get('RANK')",
    "wants_log": "import logging\nlogging.basicConfig()",
    "ends": "import os\nif 'RANK' not in os.environ.copy(): os._exit(7)",
    "lasts": "import os, time\nwhile 'RANK' not in os.environ.copy(): time.sleep(0.01)",
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that counts as one of installed packages, with some in it."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for name, text in INSTALLED.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return folder


@pytest.fixture
def learner(site: Path, tmp_path: Path, mark: str, ears: Ears) -> Iterator[Node]:
    """A node that learns, and has nothing preloaded to begin with."""
    node = Node(env=basic_env(mark) | {"PYTHONPATH": str(site)}, preload=(), learn=True)
    node.move_to(tmp_path, mark, ears)
    node.start()
    yield node
    node.supervisor.close()


def understudy(node: Node) -> int:
    """The child of the fork server that is no worker."""
    workers = set(node.wait(WorkersStarted, lambda event: event.attempt == node.attempt).pids)
    (found,) = until(lambda: len(found := node.children() - workers) == 1 and found, "there is not one understudy")
    return int(found)


SCRIPT = """
    import sys
    print([name for name in {names} if name in sys.modules], "MODE" in _os.environ, "SET_BY_HEAVY" in _os.environ)
    _os.environ["MODE"] = "fast"
    import {names_in_full}
    print(heavy.mode, _os.getppid())
    say(_os.getpid())
    import signal
    signal.pause()
"""


def script(node: Node, *names: str) -> str:
    return node.script(SCRIPT.format(names=names, names_in_full=", ".join(names)))


def learn(node: Node, ears: Ears, path: str, *names: str, nproc: int = 1) -> list[str]:
    """Run it until these are learned; what is said to be left out."""
    node.launch(path, nproc=nproc)
    ears.hear(nproc)
    left_out = []
    while True:
        word = node.wait(Learned)
        if word.why:
            left_out.append(word.why)
        elif {*names} <= {part.name for part in node.supervisor._hearth.lesson.parts}:
            return left_out


def again(node: Node, ears: Ears, path: str, nproc: int = 1) -> list[list[str]]:
    """Run it once more; what each of its workers prints."""
    node.launch(path, nproc=nproc)
    ears.hear(nproc)
    return [(node.rank_folder(rank) / "stdout.log").read_text().splitlines() for rank in range(nproc)]


def test_the_next_attempt_finds_imported_what_the_one_before_imported(learner: Node, ears: Ears) -> None:
    """Installed modules only, as the script's own environment would have them, in workers of the same fork server."""
    (learner.folder / "mine.py").write_text("import heavy")
    path = script(learner, "heavy", "mine", "numpy", "like_jemalloc")
    learn(learner, ears, path, "heavy", "numpy", "like_jemalloc", nproc=2)
    port = learner.open_store()
    for _ in range(2):
        for first, second in again(learner, ears, path, nproc=2):
            assert first == "['heavy', 'numpy', 'like_jemalloc'] False True"
            assert second == f"fast {learner.supervisor.server_pid}"
        assert learner.attempt == 3 or is_listening(port)
    until(lambda: not is_listening(port), "the store of the second attempt is left in the third")


def test_what_an_import_leaves_behind_keeps_it_from_being_learned(learner: Node, ears: Ears) -> None:
    """Each is named with the reason, the rest is learned, and no installed module takes the place of the script's own."""
    (learner.folder / "helper.py").write_text("")
    names = [name for name in INSTALLED if name not in ("heavy", "ends", "lasts", "like_jemalloc")]
    path = script(learner, *names, "heavy")
    assert learn(learner, ears, path, "heavy") == [
        f"`{name}` is not preloaded: importing it {why}"
        for name, why in {
            "asks_helper": "imports `helper`, which is the script's own",
            "wants_thread": "starts 1 thread",
            "wants_socket": "opens a socket",
            "wants_signal": "changes what signals do",
            "wants_process": "starts a process",
            "wants_rank": "reads RANK, of which each worker has its own",
            "wants_log": "sets up logging",
        }.items()
    ]
    sleeping = [line for line in marked(learner.mark).values() if "sleep" in line]
    assert len(sleeping) == 1  # the script's own
    ((first, _),) = again(learner, ears, path)
    assert first == "['heavy'] False True"


def test_an_import_that_ends_the_process_is_left_out(learner: Node, ears: Ears) -> None:
    """It is found out though no word comes of it."""
    path = script(learner, "ends", "heavy")
    assert learn(learner, ears, path, "heavy") == ["`ends` is not preloaded: importing it ends the process"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_kill_of_the_understudy_costs_nothing_but_time(learner: Node, ears: Ears, number: signal.Signals) -> None:
    """Its workers live on; while there is none, or one that does not answer, the fork server forks; then another comes."""
    path = script(learner, "heavy")
    learn(learner, ears, path, "heavy")
    again(learner, ears, path)
    standby = understudy(learner)
    send(standby, number)
    if number == signal.SIGSTOP:
        assert again(learner, ears, path)[0][0].startswith("[] ")
    wait_gone(standby)
    learner.wait(Learned)
    ((first, second),) = again(learner, ears, path)
    assert first.startswith("['heavy'] ")
    assert second == f"fast {learner.supervisor.server_pid}"


def lost(node: Node) -> int:
    """Its fork server is killed, and all else of it goes with it; the process id of the next."""
    left = node.children()
    send(node.supervisor.server_pid)
    assert [failure.signal for failure in node.wait(WorkersExited).failures] == ["SIGKILL"]
    assert not any(Path(f"/proc/{pid}").exists() for pid in left)
    return int(node.supervisor.server_pid)


def test_the_reserve_has_learned_too(learner: Node, ears: Ears) -> None:
    """The fork server is killed, and the next attempt begins at once: nobody has to learn it again. Nor does any other
    run get what was imported for this one: neither by the reserve nor by what was one.
    """
    path = script(learner, "heavy")
    first = learner.reserve()
    learn(learner, ears, path, "heavy")
    wait_gone(first)
    for _ in range(2):
        reserve = learner.reserve()
        assert lost(learner) == reserve
        assert again(learner, ears, path)[0][0] == "['heavy'] False True"
        assert learner.children() == set(learner.wait(WorkersStarted).pids), "there is an understudy"
    assert learner.supervisor.rest() is None


def test_a_reserve_that_has_learned_does_not_outlive_the_run(learner: Node, ears: Ears) -> None:
    path = script(learner, "heavy")
    first = learner.reserve()
    learn(learner, ears, path, "heavy")
    taught = until(lambda: (found := learner.reserve()) != first and found, "the reserve has not learned")
    hearth = learner.supervisor.rest()
    assert hearth is not None
    plain = until(lambda: (found := learner.reserve()) != taught and found, "it stays")
    wait_gone(taught)
    assert learner.reserve() == plain
    hearth.close()


def test_a_new_fork_server_is_taught_what_the_old_one_had_learned(learner: Node, ears: Ears) -> None:
    """It is killed together with its reserve, and the very next attempt is warm."""
    path = script(learner, "heavy")
    first = learner.reserve()
    learn(learner, ears, path, "heavy")
    wait_gone(first)
    send(learner.supervisor.server_pid, signal.SIGSTOP)
    send(learner.reserve())
    lost(learner)
    learner.wait(Ready)
    assert again(learner, ears, path)[0][0] == "['heavy'] False True"


def test_kill_of_the_fork_server_while_its_understudy_learns(learner: Node, ears: Ears) -> None:
    """Nothing is learned of that, and nothing is left."""
    path = script(learner, "lasts", "heavy")
    learner.launch(path)
    ears.hear()
    understudy(learner)
    lost(learner)
    assert again(learner, ears, path)[0][0] == "[] False False"
