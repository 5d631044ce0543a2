"""A fork server that cannot fork, or has no file descriptors left: workers go on, and the cause is told."""

from __future__ import annotations

import resource
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylaunch.core.machine.events_and_actions import WorkersExited, WorkersStarted
from raylaunch.node.protocol.messages import ManifestChanged, OpenStore, Ready, StoreOpened
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


def limit_descriptors(pid: int) -> tuple[int, int]:
    """Let the process open no more files, since 0, 1 and 2 are in use; return its limits from before."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    return soft, hard


def messages_of_failures(node: Node, count: int) -> dict[int, str]:
    """Return the messages of so many failures of the present attempt, by rank. They may come in several events."""
    found: dict[int, str] = {}
    while len(found) < count:
        exited = node.wait(WorkersExited, lambda event: event.attempt == node.attempt)
        found |= {failure.rank: failure.error.message for failure in exited.failures}
    return found


def test_workers_go_on_if_helpers_cannot_be_forked(limited_node: Node, pipe: MessagePipe, forks: Forks) -> None:
    """Neither next store nor zygote: the same workers run on, and a second later both are there."""
    node = limited_node
    server = node.supervisor.server_pid
    node.launch(node.script("import heavy\n" + WAITS))
    (worker,) = map(int, pipe.read_lines())
    node.wait(WorkersStarted)
    forks.limit(0)
    node.supervisor.handle(OpenStore(attempt=2))
    forks.wait_refused()
    assert node.events_within(2.5) == []  # by now the zygote is due
    forks.restore()
    assert node.wait(StoreOpened).port
    node.wait(ManifestChanged)
    assert worker in node.children()
    assert node.supervisor.server_pid == server

    forks.limit(2)  # of the zygote, that is: the process between it and the workers, and the first worker
    node.launch(node.script("import heavy\n" + WAITS), nproc=2)
    forks.wait_refused()
    forks.restore()
    assert len(node.wait(WorkersStarted).pids) == 2
    pipe.read_lines(2)

    limits = limit_descriptors(server)
    node.launch(node.script(WAITS), nproc=2)
    assert node.events_within(1.2) == []
    resource.prlimit(server, resource.RLIMIT_NOFILE, limits)
    assert len(node.wait(WorkersStarted).pids) == 2
    pipe.read_lines(2)
    outcome = node.run(node.script("import heavy\nimport sys\nprint('heavy' in sys.modules)"))
    assert outcome.stdout() == "True\n"
    assert node.supervisor.server_pid == server


def test_a_worker_that_cannot_be_forked_is_a_failure_with_the_cause(
    limited_node: Node, pipe: MessagePipe, forks: Forks
) -> None:
    """The workers before it had started and end as others do. The next attempt runs, with the same fork server."""
    node = limited_node
    server = node.supervisor.server_pid
    limits = resource.prlimit(server, resource.RLIMIT_NOFILE)
    forks.limit(1)
    node.launch(node.script(WAITS), nproc=3)
    pipe.read_lines()
    forks.wait_refused()
    forks.limit(1)  # a second later another one is started
    pipe.read_lines()
    (message,) = messages_of_failures(node, 1).values()
    assert message.startswith(f"the process cannot be started: {WHY}: ")
    assert "processes and threads" in message
    limit_descriptors(server)
    forks.restore()
    node.launch(node.script(WAITS))
    (message,) = messages_of_failures(node, 1).values()
    assert message == (
        "the process cannot be started: Too many open files: "
        f"the fork server (pid {server}) may have 3 open files (RLIMIT_NOFILE)"
    )
    resource.prlimit(server, resource.RLIMIT_NOFILE, limits)
    assert node.run(node.script("print('again')")).stdout() == "again\n"
    assert node.supervisor.server_pid == server


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
