"""`raylaunch -d` on a cluster: the driver is an actor. The same run is seen from a machine with another registry."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace

import pytest

from raylaunch.cluster.detached import driver_actor
from raylaunch.cluster.detached.detached_run import DriverNews
from raylaunch.cluster.detached.driver_actor import DriverActor
from tests.cluster.conftest import wait_until
from tests.warm_command import WarmCommand

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

GONE = """
import os, sys
from raylaunch.cli.detached import background_run
from raylaunch.cluster.detached import driver_actor
from raylaunch.cluster.detached.detached_run import DetachedRun
from raylaunch.core.job.job import Entrypoint, Job

os.chdir("gone")
run = DetachedRun.of_this_process(Job(entrypoint=Entrypoint(script="train.py")), "", b"")
os.chdir("..")
os.rmdir("gone")
for news in driver_actor.start(run, background_run.drive, os.environ["RAY_ADDRESS"]):
    sys.stderr.write(news.text)
sys.exit(news.exit_code)
"""
BROKEN = """
import os, sys, time
import ray
from raylaunch.cli.detached import background_run
from raylaunch.cluster.agent import serialization
from raylaunch.cluster.detached import driver_actor
from raylaunch.cluster.detached.detached_run import DetachedRun
from raylaunch.cluster.session import ray_session
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.errors import ClusterError

job = Job(entrypoint=Entrypoint(script=sys.argv[1]), placement="pack")
driver_name = driver_actor.named_resources.driver_name
tokens = []
driver_actor.named_resources.driver_name = lambda token: driver_name(tokens.append(token) or token)
if sys.argv[2] == "another build":
    protocol = serialization._protocol
    serialization._protocol = lambda *others: protocol(*others)[::-1]
else:  # as where a class of the driver's is elsewhere here
    def news(actor, request, news=driver_actor._news):
        for _ in news(actor, request):
            time.sleep(2)
            raise AttributeError("no attribute 'DriverNews'")
    driver_actor._news = news
try:
    for news in driver_actor.start(DetachedRun.of_this_process(job, "", b""), background_run.drive, os.environ["RAY_ADDRESS"]):
        sys.stderr.write(news.text)
except ClusterError as error:
    print(error.message, error.hint, sep="\\n")
(token,) = {*tokens}
with ray_session.connected(job, os.environ["RAY_ADDRESS"]):
    for left in range(100, -1, -1):
        there = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if token in each["name"]]
        there += driver_actor.named_resources.groups(token)
        if not there:
            break
        time.sleep(0.1)
    print("left:", there)
"""
SCRIPT = """
import os, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ.get("SECRET_OF_MINE"), flush=True)
while not os.path.exists("end"):
    time.sleep(0.02)
"""


def test_a_run_whose_driver_is_an_actor(launcher, tmp_path):
    """It goes on after the command, is found by others, attached to and ended. Workers have the environment."""
    env = {"SECRET_OF_MINE": "hunter2", "XDG_STATE_HOME": str(tmp_path / "state")}
    script = launcher.script(SCRIPT)
    (tmp_path / "job.yaml").write_text(
        json.dumps({"entrypoint": {"script": script}, "nnodes": 2, "placement": "pack", "preload": []})
    )
    started = launcher.python("raylaunch", "-d", "job.yaml", env=env)
    assert started.returncode == 0, started.stderr
    run_id = started.stdout.splitlines()[0]
    elsewhere = {"XDG_STATE_HOME": str(tmp_path / "elsewhere")}

    def listed() -> list[tuple[str, int]]:
        rows = json.loads(launcher.python("raylaunch", "ps", "--json", env=elsewhere).stdout)["runs"]
        return [(row["state"], row["workers"]) for row in rows if row["id"] == run_id]

    wait_until(lambda: listed() == [("running", 2)], 100, "the run to be listed")
    environ, warm = launcher.cluster.env(**elsewhere), launcher.cluster.warm
    attached = WarmCommand(warm, "raylaunch", "attach", "--since", "1h", run_id, env=environ, cwd=tmp_path)
    line = attached.stdout.readline()  # first, since an ended run is not found from elsewhere any more
    (tmp_path / "end").touch()
    assert attached.wait() == 0, attached.stderr.read()
    written = {path.name for path in (tmp_path / "runs" / "train" / run_id).iterdir()}
    assert written >= {"result.json", "report.html"}, "attach ends when all is written"
    assert line == "rank 0 of 2 hunter2\n"
    folder = tmp_path / "runs" / "train" / run_id
    assert (folder / "attempt-1" / "rank-0" / "stdout.log").read_text() == "rank 0 of 2 hunter2\n"
    wait_until(lambda: "all 2 workers finished" in (folder / "driver.log").read_text(), 100, "the driver's last words")


def test_a_driver_on_a_host_without_the_folder(launcher, tmp_path):
    """The run ends, and the command says which folder is missing on which host."""
    (tmp_path / "gone").mkdir()
    (tmp_path / "begin.py").write_text(GONE)
    begun = launcher.python("begin.py")
    assert begun.returncode == 2, begun.stderr
    told = begun.stderr.splitlines()
    assert re.fullmatch(
        rf"error: the folder {tmp_path}/gone, in which the run was started, cannot be used on \S+ \([\d.]+\): "
        "No such file or directory",
        told[0],
    ), told
    assert told[2].startswith("hint: Ray has started the driver there")


def test_a_driver_of_another_build(launcher, tmp_path):
    """Nothing is started, and the message says what differs: the version may be the same."""
    (tmp_path / "begin.py").write_text(BROKEN)
    begun = launcher.python("begin.py", launcher.script("print('ran', flush=True)"), "another build")
    assert begun.returncode == 0, begun.stderr
    message, hint, left = begun.stdout.splitlines()
    assert re.fullmatch(
        r"the driver of the run cannot be started: Ray has raylaunch (\S+) \(protocol (\w+), (.+)\) there, and this "
        r"command has raylaunch \1 \(protocol (?!\2)\w+, \3\)",
        message,
    ), message
    assert hint == "install the same raylaunch and Ray on all nodes, and for the command"
    assert left == "left: []"


def test_a_driver_that_cannot_be_understood(launcher, tmp_path):
    """The command fails before it knows the id of the run, and nothing of that is left."""
    (tmp_path / "begin.py").write_text(BROKEN)
    begun = launcher.python("begin.py", launcher.script("import time; time.sleep(1000)"), "another class")
    assert begun.returncode == 0, begun.stderr
    message, _, left = begun.stdout.splitlines()
    assert message == "the driver of the run cannot be understood: AttributeError: no attribute 'DriverNews'"
    assert left == "left: []"


class EndingDriver(DriverActor):
    """A driver whose run is over, in this process."""

    def _drive(self) -> None:
        """There is nothing to run."""

    def _end(self) -> None:
        """This process goes on."""

    def lingers(self) -> float:
        """Return for how long it waits for the command."""
        began = driver_actor.time.monotonic()
        self._leave(0)
        return driver_actor.time.monotonic() - began


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when somebody sleeps; and a process that Ray knows as an actor."""
    now = [1000.0]
    passes = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    actor = SimpleNamespace(
        current_actor=None, was_current_actor_reconstructed=False, get_actor_name=lambda: "raylaunch-driver-1"
    )
    monkeypatch.setattr(driver_actor, "time", passes)
    monkeypatch.setattr(driver_actor, "_ASK_SECONDS", 0.01)
    monkeypatch.setattr(driver_actor.ray, "get_runtime_context", lambda: actor)
    return passes


@pytest.mark.parametrize(("ago", "lingers"), [(0, 5), (2, 3), (5, 0), (100, 0)])
def test_a_driver_does_not_wait_for_a_command_that_has_left(clock, ago, lingers):
    """It waits until 5 s after the last call of the command, which may be about to call again."""

    async def leave() -> float:
        driver = EndingDriver(0.0)
        clock.sleep(50)
        assert (await driver.news(0))[1] == []
        clock.sleep(ago)
        return driver.lingers()

    assert asyncio.run(leave()) == pytest.approx(lingers, abs=0.1)


def test_a_driver_waits_for_a_command_that_asks(clock):
    """However long ago its call began, which gets the end of the run."""

    async def leave() -> float:
        driver = EndingDriver(0.0)
        asked = asyncio.create_task(driver.news(0))
        await asyncio.sleep(0)
        clock.sleep(100)
        waited = driver.lingers()
        assert (await asked)[1] == [DriverNews(exit_code=0)]
        return waited

    assert asyncio.run(leave()) == pytest.approx(5, abs=0.1)
