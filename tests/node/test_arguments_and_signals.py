"""What torchrun hands to a worker besides its environment: its own arguments, and the signals that it gets."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from raylaunch.core.events import WorkersExited, WorkersStopped
from raylaunch.node.brood import Brood
from raylaunch.node.young import Young
from tests.node.harness import SECONDS, Ears, Node, basic_env, running

pytestmark = pytest.mark.timeout(300)

WAITS = """
    import os, signal, time
    def heard(number, frame):
        print(signal.Signals(number).name, flush=True)
        raise SystemExit({code})
    signal.signal(signal.{name}, heard)
    say(os.environ["RANK"])
    while True:
        time.sleep(0.01)  # a signal that comes just before a long one is heard only after it
"""


def test_local_rank_is_put_into_arguments(node: Node) -> None:
    """In any place of any argument, as torchrun does it: other references stay, and two dollars are one."""
    script = node.script("import sys\nprint(sys.argv[1:])")
    outcome = node.run(script, "--device=cuda:${local_rank}", "${local_rank}", "${HOME}", "$$5", 7, nproc=2)
    assert outcome.stdout(0) == "['--device=cuda:0', '0', '${HOME}', '$5', '7']\n"
    assert outcome.stdout(1) == "['--device=cuda:1', '1', '${HOME}', '$5', '7']\n"


def test_the_local_rank_can_come_as_an_argument(node: Node) -> None:
    """As `torch.distributed.launch` did it: before the script's own arguments."""
    script = node.script("import sys\nprint(sys.argv[1:])")
    outcome = node.run(script, "--lr", "3", nproc=2, pass_local_rank=True)
    assert outcome.stdout(1) == "['--local-rank=1', '--lr', '3']\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"])
def test_workers_are_stopped_by_the_signal_that_the_driver_got(node: Node, ears: Ears, name: str) -> None:
    """Whatever it was; they have their grace."""
    node.launch(node.script(WAITS.format(name=name, code=0)), nproc=1)
    ears.hear()
    node.supervisor.stop(node.attempt, 20.0, name)
    node.wait(WorkersStopped)
    assert (node.rank_folder() / "stdout.log").read_text() == f"{name}\n"


def test_a_forwarded_signal_reaches_workers_and_nothing_else(node: Node, ears: Ears) -> None:
    """The script's handler runs; its children, which have none, live on; and the attempt goes on."""
    text = """
        import os, signal, subprocess, time
        child = subprocess.Popen(["sleep", "60"])
        heard = []
        signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
        say("ready")
        while not heard:
            time.sleep(0.01)
        print("child", child.poll())
        child.kill()
        child.wait()
    """
    node.launch(node.script(text))
    ears.hear()
    node.supervisor.forward(node.attempt, "SIGUSR1")
    assert node.wait(WorkersExited).failures == ()
    assert (node.rank_folder() / "stdout.log").read_text() == "child None\n"


def test_a_forwarded_signal_for_another_attempt_is_dropped(node: Node, ears: Ears) -> None:
    """It would kill workers that know nothing of it yet."""
    script = node.script("import os\nsay('up')\nopen('go').read()\nprint('lived')")
    go = node.folder / "go"
    os.mkfifo(go)
    node.launch(script)
    ears.hear()
    node.supervisor.forward(node.attempt - 1, "SIGUSR1")
    go.write_text("go")
    assert node.wait(WorkersExited).failures == ()


def test_a_forwarded_signal_waits_for_the_handler_of_a_young_worker(node: Node, ears: Ears) -> None:
    """It would end a script that is still importing; who has a handler gets it at once."""
    text = """
        import os, signal
        if os.environ["RANK"] == "1":
            say("up")
            open("go").read()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        signal.signal(signal.SIGUSR1, lambda *_: None)
        say("ready")
        signal.sigwait([signal.SIGUSR1])
        say("heard", os.environ["RANK"])
    """
    go = node.folder / "go"
    os.mkfifo(go)
    node.launch(node.script(text), nproc=2)
    assert sorted(ears.hear(2)) == ["ready", "up"]
    node.supervisor.forward(node.attempt, "SIGUSR1")
    assert ears.hear() == ["heard 0"]
    go.write_text("go")
    assert ears.hear(2) == ["ready", "heard 1"]
    assert node.wait(WorkersExited).failures == ()


def test_a_forwarded_signal_for_another_program_does_not_wait() -> None:
    """It may never have a handler; without one it ends by the signal, as under a shell."""
    brood = Brood(lambda *_: None, spared=set)
    with subprocess.Popen(["sleep", "60"]) as worker:
        brood.add(worker.pid, SimpleNamespace(kind="command"), report=-1, stacks=-1)
        brood.forward(brood.attempt, signal.SIGUSR2)
        assert worker.wait(SECONDS) == -signal.SIGUSR2


def test_signals_do_not_wait_for_ever() -> None:
    """Forwarding is not politeness: a script that has no handler for long ends by the signal."""
    with subprocess.Popen(["sleep", "60"]) as worker:
        patient, hasty = Young(), Young(patience=0.0)
        patient.signal(worker.pid, signal.SIGUSR2)
        patient.press([worker.pid])
        assert patient.until_look()
        assert worker.poll() is None
        hasty.signal(worker.pid, signal.SIGUSR2)
        hasty.press([worker.pid])
        assert hasty.until_look() is None
        assert worker.wait() == -signal.SIGUSR2
    patient.press([])
    assert patient.until_look() is None, "who is gone is forgotten"


def test_a_group_may_have_its_own_address_in_the_environment(node: Node) -> None:
    """The tutorial's way: MASTER_ADDR and MASTER_PORT set by the script, which then serves the store itself."""
    text = """
        import os
        import torch.distributed as dist
        rank = int(os.environ["RANK"])
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", own_port(rank)
        dist.init_process_group("gloo", rank=rank, world_size=2)
        print(dist.get_world_size())
        dist.destroy_process_group()
    """
    outcome = node.run(node.script(text), nproc=2, port=node.open_store())
    assert outcome.stdout() == "2\n", outcome.stderr()


@pytest.mark.parametrize("own", [("torch",)], indirect=True, ids=["torch"])
def test_the_agents_store_is_found_by_the_name_localhost(own: Node) -> None:
    """`tcp://localhost:$MASTER_PORT` works under torchrun, whose store listens everywhere; ours has one address."""
    own.set(address="127.0.0.2")
    text = """
        import os
        import torch.distributed as dist
        url = "tcp://localhost:" + os.environ["MASTER_PORT"]
        dist.init_process_group("gloo", init_method=url, rank=int(os.environ["RANK"]), world_size=2)
        print(dist.get_world_size())
        dist.destroy_process_group()
    """
    port = own.open_store()
    outcome = own.run(own.script(text), nproc=2, port=port)
    assert outcome.stdout() == "2\n", outcome.stderr()


def test_a_binding_that_cannot_be_had_ends_the_job(node: Node) -> None:
    """Without a GPU there are no CPUs near it; the worker says so, and no restart would mend it."""
    outcome = node.run(node.script("print(1)"), numa_binding="node")
    assert outcome.exit_code == 1
    assert outcome.failure.error is not None
    assert outcome.failure.error.hopeless
    assert "cannot bind local rank 0 to the CPUs near its GPU" in outcome.failure.error.message


TIMED = """
    import os, sys, time
    import torch.distributed.elastic.timer as timer
    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after={after}):
        time.sleep(0.3)
    print("in time")
"""


def test_the_file_timer_kills_who_overstays(tmp_path: Path, mark: str, ears: Ears) -> None:
    """As under torchrun with TORCHELASTIC_ENABLE_FILE_TIMER=1; whoever is in time lives, and no pipe is left."""
    with running(env=basic_env(mark) | {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}) as node:
        pipe = Path(node.supervisor.settings.env["TORCHELASTIC_TIMER_FILE"])
        node.move_to(tmp_path, mark, ears)
        node.set(env=node.supervisor.settings.env | {"TORCHELASTIC_TIMER_FILE": str(pipe)})
        assert node.run(node.script(TIMED.format(after=60))).stdout() == "in time\n"
        late = node.run(node.script(TIMED.format(after=0.01)))
        assert late.exit_code == -signal.SIGKILL
        assert node.run(node.script(TIMED.format(after=60))).stdout() == "in time\n"
    assert not pipe.exists()
