"""What metadata servers of clouds answer, and that a notice drains the node, against servers of our own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from msgspec import msgpack

from raylaunch.capabilities.notices.agent import CLOUDS, NoticeStatus, PreemptionNotices
from raylaunch.capabilities.notices.driver import NoticeDrains
from raylaunch.cluster.capability import NEVER
from raylaunch.cluster.run import run_job
from raylaunch.core.job.job import Entrypoint, Job, RayOptions
from raylaunch.core.machine.events_and_actions import NodeDraining
from tests.fakes import RunRecorder, agent_port, driver_port

AT = 1_795_000_000
AWS_TIME = "2026-11-18T11:06:40Z"
AZURE_TIME = "Wed, 18 Nov 2026 11:06:40 GMT"


class MetadataServer:
    """Answers as those of all three clouds, and as none of them if `is_noticed` is None."""

    def __init__(self) -> None:
        self.is_noticed: bool | None = False
        self.token = "first"
        self.others = ["vm-8"]
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                ok = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                self.answer(200 if ok else 400, outer.token)

            def do_GET(self) -> None:
                self.answer(*outer.answer(self.path, self.headers))

            def answer(self, code: int, text: str) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = "http://127.0.0.1:{1}".format(*self.http.server_address)
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, path: str, headers: Message) -> tuple[int, str]:
        if self.is_noticed is None:
            return 500, ""
        if path == "/latest/meta-data/spot/instance-action":
            if headers.get("X-aws-ec2-metadata-token") != self.token:
                return 401, ""
            return (200, json.dumps({"action": "terminate", "time": AWS_TIME})) if self.is_noticed else (404, "")
        if path == "/computeMetadata/v1/instance/preempted" and headers.get("Metadata-Flavor") == "Google":
            return 200, "TRUE" if self.is_noticed else "FALSE"
        if path.startswith("/metadata/instance/compute/name?") and headers.get("Metadata") == "true":
            return 200, "vm-7"
        if path.startswith("/metadata/scheduledevents?") and headers.get("Metadata") == "true":
            names = ["vm-7", *self.others] if self.is_noticed else self.others
            found = {"EventType": "Preempt", "Resources": names, "NotBefore": AZURE_TIME}
            freeze = {"EventType": "Freeze", "Resources": ["vm-7"], "NotBefore": ""}
            return 200, json.dumps({"Events": [freeze, found]})
        return 400, ""


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    found = MetadataServer()
    yield found
    found.http.shutdown()
    found.http.server_close()


@pytest.mark.parametrize("cloud", CLOUDS)
def test_what_a_server_says(server, cloud):
    """No notice, then one, with the time that the cloud gives; Google gives none, and it stays the same."""
    ask = CLOUDS[cloud](server.url)
    assert ask() is None
    server.is_noticed = True
    found = ask()
    assert found == AT if cloud != "gcp" else found > time.time()
    assert ask() == found
    server.is_noticed = None
    with pytest.raises(OSError, match="500"):
        ask()


def test_a_token_of_aws_that_has_expired_is_replaced(server):
    """The question that is refused counts as unanswered; the next one has a new token."""
    ask = CLOUDS["aws"](server.url)
    assert ask() is None
    server.token = "second"
    with pytest.raises(OSError, match="401"):
        ask()
    assert ask() is None


@pytest.fixture
def agent_of(server):
    """`agent_of(cloud)` runs a node's part until what it tells satisfies a condition, and returns that."""

    def run(cloud: str, change, is_enough):
        told: list[NoticeStatus] = []

        async def watch():
            spec = spec_of(cloud)
            port = agent_port(spec=spec, tell=lambda section: told.append(msgpack.decode(section, type=NoticeStatus)))
            part = PreemptionNotices(port, dict.fromkeys(CLOUDS, server.url), poll=0.02)
            change(server)
            while not is_enough(told):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            part.close()

        asyncio.run(asyncio.wait_for(watch(), 60))
        return told

    return run


def spec_of(cloud: str):
    class Spec:
        job = replace(Job(), preemption_notices=cloud)

    return Spec()


def test_an_agent_tells_how_much_time_is_left(agent_of):
    """As often as it asks, so that a driver that takes over has it from now on."""

    def notice(server):
        server.is_noticed = True

    began = time.time()
    told = [status.left for status in agent_of("aws", notice, lambda told: len(told) > 1)]
    assert AT - time.time() <= told[1] < told[0] <= AT - began


def test_an_agent_tells_of_a_server_that_does_not_answer(agent_of):
    """As where the job does not run in that cloud."""

    def fail(server):
        server.is_noticed = None

    (told,) = agent_of("gcp", fail, bool)
    assert "HTTP Error 500" in told.problem


def test_an_answer_that_cannot_be_read_is_no_answer(agent_of):
    """The server is asked again, and the driver told."""

    def garble(server):
        server.answer = lambda *_: (200, "null")

    (told,) = agent_of("aws", garble, bool)
    assert told.problem == "TypeError: 'NoneType' object is not subscriptable"


def test_nothing_is_asked_unless_wanted(server, agent_of):
    """No thread, no request."""
    assert agent_of("off", lambda server: setattr(server, "is_noticed", True), lambda _: True) == []


SCRIPT = """
import os, time
while not os.path.exists("drained"):
    time.sleep(0.02)
"""


class Drained(RunRecorder):
    """Lets the script end when a node is drained."""

    def on_plan(self, *_) -> None:
        pass

    def on_entry(self, entry, machine) -> None:
        if isinstance(entry.event, NodeDraining):
            self.entries.append(entry.event)
            Path("drained").touch()


def test_a_notice_drains_a_node_of_a_run(server, tmp_path, monkeypatch):
    """With what a run has by default, on this machine, without Ray."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("raylaunch.capabilities.notices.agent.SERVERS", dict.fromkeys(CLOUDS, server.url))
    server.is_noticed = True
    (tmp_path / "train.py").write_text(SCRIPT)
    job = Job(
        entrypoint=Entrypoint(script="train.py"),
        preemption_notices="gcp",
        preload=[],
        log_dir=str(tmp_path),
        ray=RayOptions(address="none"),
    )
    observed = Drained()
    assert run_job(job, "", observed).result.exit_code == 0
    (event,) = observed.entries
    assert (event.node, event.by) == ("node-1", "gcp")


class FakeMachine:
    job = replace(Job(), preemption_notices="azure")

    def __init__(self) -> None:
        self.nodes = {}


def test_a_notice_drains_the_node_once_it_has_joined():
    """Its host is not used again; a time that is past counts as ten seconds."""
    machine, said = FakeMachine(), []
    part = NoticeDrains(driver_port(machine=machine, say=said.append))
    part.told("node-2", msgpack.encode(NoticeStatus(left=-5.0)))
    assert part.next_check == NEVER
    machine.nodes["node-2"] = None
    assert part.next_check == 0
    (event,) = part.due_events(100.0)
    assert (event.node, event.deadline, event.by) == ("node-2", 110.0, "azure")
    assert event.why == "the cloud takes its machine away in 10 s"
    part.told("node-2", msgpack.encode(NoticeStatus(left=-7.0)))
    assert part.next_check == NEVER
    assert said == []


def test_the_clock_of_the_node_s_machine_does_not_matter(monkeypatch):
    """Only how much time it says is left, since it was said."""
    machine = FakeMachine()
    machine.nodes["node-2"] = None
    part = NoticeDrains(driver_port(machine=machine))
    now = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now)
    part.told("node-2", msgpack.encode(NoticeStatus(left=100.0)))
    now += 40.0
    (event,) = part.due_events(1000.0)
    assert event.deadline == 1060.0


def test_a_server_that_cannot_be_asked_is_said_once():
    """All nodes tell the same."""
    said = []
    part = NoticeDrains(driver_port(machine=FakeMachine(), say=said.append))
    for node in ("node-1", "node-2"):
        part.told(node, msgpack.encode(NoticeStatus(problem="URLError: no route")))
    assert said == ["node-1 cannot be asked for notices (`preemption_notices: azure`): URLError: no route"]
