"""A fork server that cannot fork, or has no file descriptors left: the failure says so."""

from __future__ import annotations

import resource
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylaunch.core.machine.events_and_actions import WorkersExited, WorkersStarted
from raylaunch.node.protocol.node_goal import OpenStore
from raylaunch.node.protocol.node_status import ManifestChanged, Ready, StoreOpened
from tests.node.harness import MessagePipe, Node, basic_env, until

pytestmark = pytest.mark.timeout(300)

FORKS_FAIL = """
    import errno, os
    def fork(fork=os.fork):
        try:
            left = int(open(os.environ["FORKS_LEFT"]).read())
        except FileNotFoundError:
            return fork()
        if not left:
            open(os.environ["FORKS_LEFT"] + ".refused", "a").close()
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        open(os.environ["FORKS_LEFT"], "w").write(str(left - 1))
        return fork()
    os.fork = fork
"""
"""A module in whose process forks fail as soon as the file FORKS_LEFT says so."""
HEAVY = "import time\nbegan = time.process_time()\nwhile time.process_time() < began + 0.2:\n    pass\n"
WAITS = "import signal\nsay(_os.getpid())\nsignal.pause()"
WHY = "Resource temporarily unavailable"


class Forks:
    """The limit of forks of a node's fork server and of all its forks."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._refused = Path(f"{file}.refused")

    def limit(self, count: int) -> None:
        """Let so many forks succeed from now on."""
        self._refused.unlink(missing_ok=True)
        self._file.write_text(str(count))

    def wait_refused(self) -> None:
        until(self._refused.exists, "nothing was to be forked")

    def restore(self) -> None:
        self._file.unlink()


@pytest.fixture
def forks(tmp_path: Path) -> Forks:
    return Forks(tmp_path / "forks-left")


@pytest.fixture
def limited_node(tmp_path: Path, mark: str, pipe: MessagePipe, forks: Forks) -> Iterator[Node]:
    """A node with `preload: auto` whose forks can be limited."""
    site = tmp_path / "site-packages"
    site.mkdir()
    for name, text in {"forks_fail": FORKS_FAIL, "heavy": HEAVY}.items():
        (site / f"{name}.py").write_text(textwrap.dedent(text))
    env = basic_env(mark) | {"PYTHONPATH": str(site), "FORKS_LEFT": str(tmp_path / "forks-left")}
    node = Node(env=env, preload=("forks_fail",), preload_auto=True)
    node.use_for_test(tmp_path, mark, pipe)
    node.start()
    yield node
    node.supervisor.close()


def limit_descriptors(pid: int) -> None:
    """Let the process open no more files, since 0, 1 and 2 are in use."""
    hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))


def messages_of_failures(node: Node, count: int) -> dict[int, str]:
    """Return the messages of so many failures of the present attempt, by rank. They may come in several events."""
    found: dict[int, str] = {}
    while len(found) < count:
        exited = node.wait(WorkersExited, lambda event: event.attempt == node.attempt)
        found |= {failure.rank: failure.error.message for failure in exited.failures}
    return found


def test_workers_go_on_if_the_zygote_cannot_be_forked(limited_node: Node, pipe: MessagePipe, forks: Forks) -> None:
    """Later there is one."""
    node = limited_node
    server = node.supervisor.client.pid
    node.launch(node.script("import heavy\n" + WAITS))
    (worker,) = map(int, pipe.read_lines())
    node.wait(WorkersStarted)
    forks.limit(0)
    forks.wait_refused()
    assert node.events_within(0.2) == []
    forks.restore()
    node.wait(ManifestChanged)
    assert worker in node.children()
    assert node.supervisor.client.pid == server


def test_a_store_that_cannot_be_forked_says_why(limited_node: Node, forks: Forks) -> None:
    """The driver decides what follows."""
    forks.limit(0)
    limited_node.supervisor.handle(OpenStore(attempt=1))
    opened = limited_node.wait(StoreOpened)
    assert opened.port == 0
    assert opened.why.startswith(f"{WHY}: ")


@pytest.mark.parametrize("has_zygote", [False, True], ids=["", "zygote"])
def test_a_worker_that_cannot_be_forked_is_a_failure_with_the_cause(
    limited_node: Node, pipe: MessagePipe, forks: Forks, has_zygote: bool
) -> None:
    """The workers before it had started and end as others do. The next attempt runs, with the same fork server."""
    node = limited_node
    server = node.supervisor.client.pid
    if has_zygote:
        node.launch(node.script("import heavy\n" + WAITS))
        pipe.read_lines()
        node.wait(ManifestChanged)
    forks.limit(2 if has_zygote else 1)  # of the zygote's forks, one is the process between it and the workers
    node.launch(node.script("import heavy\n" + WAITS), nproc=2)
    found = messages_of_failures(node, 2 if has_zygote else 1)
    message = found[1]
    assert message.startswith(f"the process cannot be started: {WHY}: ")
    assert "processes and threads" in message
    forks.restore()
    assert node.run(node.script("print('again')")).stdout() == "again\n"
    assert node.supervisor.client.pid == server


def test_a_fork_server_without_descriptors_is_started_again(limited_node: Node, pipe: MessagePipe) -> None:
    """The failure of its workers names the limit."""
    node = limited_node
    server = node.supervisor.client.pid
    node.launch(node.script(WAITS))
    pipe.read_lines()
    node.wait(WorkersStarted)
    limit_descriptors(server)
    node.launch(node.script(WAITS))
    (failure,) = node.wait(WorkersExited, lambda event: event.attempt == node.attempt).failures
    limit = f"the fork server (pid {server}) may have 3 open files (RLIMIT_NOFILE)"
    assert failure.what == (
        f"was killed by SIGKILL (together with the fork server (process {server}): Too many open files: {limit})"
    )
    assert node.run(node.script("print('again')")).stdout() == "again\n"


def test_a_fork_server_that_cannot_be_started_names_the_limit(tmp_path: Path, mark: str, pipe: MessagePipe) -> None:
    """Not only that it has died: after some attempts, the node says which limit was met."""
    text = """
        import errno, os
        def pipe():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        os.pipe = pipe
    """
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(text))
    node = Node(env=basic_env(mark) | {"PYTHONPATH": str(tmp_path)}, preload=())
    node.use_for_test(tmp_path, mark, pipe)
    node.supervisor.start()
    ready = node.wait(Ready)
    assert not ready.torch
    assert ready.why[-1].startswith("there is no fork server: Too many open files: the fork server (pid ")
    assert "RLIMIT_NOFILE" in ready.why[-1]
    node.supervisor.close()
