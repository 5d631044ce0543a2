"""`preload: auto`: the modules that a script imports are imported before its next attempt, unnoticed by the script."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from raylaunch.core.machine.events_and_actions import WorkersExited, WorkersStarted
from raylaunch.node.preload import initial
from raylaunch.node.preload.controller import RecordsPoller
from raylaunch.node.protocol.node_status import ManifestChanged, Ready
from tests.node.harness import (
    MessagePipe,
    Node,
    basic_env,
    is_listening,
    marked,
    send_signal,
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
    """A folder that counts as site-packages, with some modules."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for name, text in INSTALLED.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return folder


@pytest.fixture
def auto_node(site: Path, tmp_path: Path, mark: str, pipe: MessagePipe) -> Iterator[Node]:
    """A node with `preload: auto` and no other preloads."""
    node = Node(env=basic_env(mark) | {"PYTHONPATH": str(site)}, preload=(), preload_auto=True)
    node.use_for_test(tmp_path, mark, pipe)
    node.start()
    yield node
    node.supervisor.close()


def zygote_pid(node: Node) -> int:
    """Return the child of the fork server that is no worker."""
    workers = set(node.wait(WorkersStarted, lambda event: event.attempt == node.attempt).pids)
    (found,) = until(lambda: len(found := node.children() - workers) == 1 and found, "there is not one zygote")
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


def run_until_preloaded(node: Node, pipe: MessagePipe, path: str, *names: str, nproc: int = 1) -> list[str]:
    """Run the script until these modules are in the manifest; return why others are left out."""
    node.launch(path, nproc=nproc)
    pipe.read_lines(nproc)
    left_out = []
    while True:
        changed = node.wait(ManifestChanged)
        if changed.why:
            left_out.append(changed.why)
        elif (manifest := node.supervisor.client.manifest) and {*names} <= {module.name for module in manifest.parts}:
            return left_out


def run_again(node: Node, pipe: MessagePipe, path: str, nproc: int = 1) -> list[list[str]]:
    """Run the script once more; return the lines that each worker prints."""
    node.launch(path, nproc=nproc)
    pipe.read_lines(nproc)
    return [(node.rank_folder(rank) / "stdout.log").read_text().splitlines() for rank in range(nproc)]


def test_the_next_attempt_finds_imported_what_the_one_before_imported(auto_node: Node, pipe: MessagePipe) -> None:
    """Only installed modules, imported in the script's environment, in workers of the same fork server."""
    (auto_node.folder / "mine.py").write_text("import heavy")
    path = script(auto_node, "heavy", "mine", "numpy", "like_jemalloc")
    run_until_preloaded(auto_node, pipe, path, "heavy", "numpy", "like_jemalloc", nproc=2)
    port = auto_node.open_store()
    for _ in range(2):
        for first, second in run_again(auto_node, pipe, path, nproc=2):
            assert first == "['heavy', 'numpy', 'like_jemalloc'] False True"
            assert second == f"fast {auto_node.supervisor.client.pid}"
        assert auto_node.attempt == 3 or is_listening(port)
    until(lambda: not is_listening(port), "the store of the second attempt is left in the third")


def test_a_module_whose_import_has_a_side_effect_is_not_preloaded(auto_node: Node, pipe: MessagePipe) -> None:
    """The user is told which and why. Other modules are preloaded. No installed module replaces the script's own."""
    (auto_node.folder / "helper.py").write_text("")
    names = [name for name in INSTALLED if name not in ("heavy", "ends", "lasts", "like_jemalloc")]
    path = script(auto_node, *names, "heavy")
    assert run_until_preloaded(auto_node, pipe, path, "heavy") == [
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
    sleeping = [line for line in marked(auto_node.mark).values() if "sleep" in line]
    assert len(sleeping) == 1  # the script's own
    ((first, _),) = run_again(auto_node, pipe, path)
    assert first == "['heavy'] False True"


AHEAD = """
import sys
from raylaunch.node.preload import zygote
from raylaunch.node.protocol.import_manifest import ImportedModule, ImportManifest
(name,), own = sys.argv[1:2], ("RANK", "LOCAL_RANK", "MASTER_PORT", "RAYLAUNCH_ATTEMPT", "RAYLAUNCH_PAGE", "RAYLAUNCH_SURVIVORS")
modules = ImportManifest(entry=(), parts=(ImportedModule(name=name),), apart=frozenset(own))
zygote._import_all(modules, lambda name: print("imports", name), in_a_hurry=True)
print(name in sys.modules)
"""


@pytest.mark.parametrize("module", initial._STATE_MODULES)  # noqa: SLF001
def test_the_modules_of_state_and_elastic_can_be_imported_ahead(module: str) -> None:
    """Their import has no effect and depends on no worker: torch is changed when the script names `elastic`."""
    found = subprocess.run([sys.executable, "-c", AHEAD, module], capture_output=True, text=True, check=False)
    assert found.stdout.splitlines() == [f"imports {module}", "True"], found.stderr


def test_a_module_whose_import_kills_the_process_is_not_preloaded(auto_node: Node, pipe: MessagePipe) -> None:
    """The zygote cannot report it, so the fork server concludes it from the last import that began."""
    path = script(auto_node, "ends", "heavy")
    assert run_until_preloaded(auto_node, pipe, path, "heavy") == [
        "`ends` is not preloaded: importing it ends the process"
    ]


def test_workers_start_though_the_zygote_was_killed(auto_node: Node, pipe: MessagePipe) -> None:
    """It is replaced by another, and its workers live on."""
    path = script(auto_node, "heavy")
    run_until_preloaded(auto_node, pipe, path, "heavy")
    assert run_again(auto_node, pipe, path)[0][0].startswith("['heavy'] ")
    zygote = zygote_pid(auto_node)
    send_signal(zygote)
    wait_gone(zygote)
    auto_node.wait(ManifestChanged)
    ((first, second),) = run_again(auto_node, pipe, path)
    assert first.startswith("['heavy'] ")
    assert second == f"fast {auto_node.supervisor.client.pid}"


def kill_fork_server(node: Node) -> None:
    """Kill the fork server, see that its children are gone, and wait for the next one."""
    left = node.children()
    send_signal(node.supervisor.client.pid)
    assert [failure.signal for failure in node.wait(WorkersExited).failures] == ["SIGKILL"]
    node.wait(Ready)
    assert not any(Path(f"/proc/{pid}").exists() for pid in left)


def test_a_new_fork_server_imports_what_the_old_one_had_imported(auto_node: Node, pipe: MessagePipe) -> None:
    """Already the next attempt finds the modules imported."""
    path = script(auto_node, "heavy")
    run_until_preloaded(auto_node, pipe, path, "heavy")
    kill_fork_server(auto_node)
    assert run_again(auto_node, pipe, path)[0][0] == "['heavy'] False True"


def test_kill_of_the_fork_server_while_its_zygote_imports(auto_node: Node, pipe: MessagePipe) -> None:
    """No import is reported, and no process is left."""
    path = script(auto_node, "lasts", "heavy")
    auto_node.launch(path)
    pipe.read_lines()
    zygote_pid(auto_node)
    kill_fork_server(auto_node)
    assert run_again(auto_node, pipe, path)[0][0] == "[] False False"


def test_records_are_read_when_the_workers_no_longer_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """And at longer intervals from then on. What an attempt has left unread is read with the next one's."""
    now = [100.0]
    monkeypatch.setattr("raylaunch.node.preload.controller.time", SimpleNamespace(monotonic=lambda: now[0]))
    poller = RecordsPoller()

    def record(fd: int, name: str) -> None:
        os.write(fd, f'[0, "{name}", [], {{}}]\n'.encode())

    def polls(seconds: float) -> list[tuple[list[str], int]]:
        """Wait until the next poll, which must be in so many seconds, and return what it reads."""
        assert poller.poll_at == now[0] + seconds
        now[0] += seconds / 2
        assert poller.poll() == []
        now[0] += seconds / 2
        return [([found.name for found in records], nproc) for records, nproc in poller.poll()]

    first = poller.open(2)
    record(first, "heavy")
    assert polls(2.0) == []
    assert polls(2.0) == [(["heavy"], 2)]
    assert polls(4.0) == []
    record(first, "late")
    poller.stop()
    assert poller.poll_at is None
    second = poller.open(1)
    assert polls(2.0) == []
    record(second, "other")
    assert polls(2.0) == []
    assert polls(2.0) == [(["heavy", "late"], 2), (["other"], 1)]
    assert polls(4.0) == []
    poller.discard()
