"""Asks the metadata server of a cloud's machine whether the machine will be taken away.

- AWS: `spot/instance-action` of the instance metadata service, version 2, which needs a token. The notice comes two
  minutes before.
- Google Cloud: `instance/preempted`. It comes 30 seconds before.
- Azure: scheduled events. A `Preempt` comes 30 seconds before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from msgspec import msgpack

from raylaunch.cluster.capability import AgentPart, AgentPort
from raylaunch.core.decoding import prepare

POLL_SECONDS = 2.0
_ANSWER_SECONDS = 2.0
_PROBLEM_AFTER = 3
"""Questions without an answer, one after the other, after which the driver is told."""
_GOOGLE_SECONDS = 30.0
_NOT_FOUND, _UNAUTHORIZED = 404, 401
_ENDS = ("Preempt", "Terminate", "Reboot", "Redeploy")
"""The events of Azure after which no process is left. A machine that has booted again is another node of Ray's."""
SERVERS = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeStatus:
    """What the metadata server of the agent's machine says."""

    left: float | None = None
    """Seconds until the machine is taken away; None: there is no notice. Clocks of two machines may differ."""
    problem: str = ""
    """Why the server cannot be asked."""


prepare(NoticeStatus)


class PreemptionNotices(AgentPart):
    """Asks the metadata server of the node's machine, if the job wants that."""

    def __init__(self, port: AgentPort, servers: Mapping[str, str] | None = None, poll: float = POLL_SECONDS) -> None:
        """`servers`: the address of each cloud's metadata server, for tests."""
        self._port, self._poll = port, poll
        self._task: asyncio.Task[None] | None = None
        cloud = port.spec.job.preemption_notices
        if cloud in CLOUDS:
            ask = CLOUDS[cloud]((servers or SERVERS)[cloud])
            self._task = asyncio.get_running_loop().create_task(self._watch(ask))

    def close(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self, ask: Callable[[], float | None]) -> None:
        told, failures = NoticeStatus(), 0
        while True:
            status = told
            try:
                taken_at, failures = await asyncio.to_thread(ask), 0
                status = NoticeStatus(left=None if taken_at is None else taken_at - time.time())
            except Exception as error:  # noqa: BLE001  # whatever a server answers, it is asked again
                failures += 1
                if failures == _PROBLEM_AFTER:
                    status = NoticeStatus(problem=f"{type(error).__name__}: {error}")
            if status != told:
                self._port.tell(msgpack.encode(status))
                told = status
            await asyncio.sleep(self._poll)


class _Aws:
    def __init__(self, server: str) -> None:
        self._server, self._token = server, ""

    def __call__(self) -> float | None:
        if not self._token:
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            self._token = _text(f"{self._server}/latest/api/token", lifetime, method="PUT")
        url = f"{self._server}/latest/meta-data/spot/instance-action"
        try:
            action = json.loads(_text(url, {"X-aws-ec2-metadata-token": self._token}))
        except HTTPError as error:
            if error.code == _UNAUTHORIZED:
                self._token = ""
            elif error.code == _NOT_FOUND:
                return None
            raise
        at = datetime.strptime(action["time"], "%Y-%m-%dT%H:%M:%SZ")  # noqa: DTZ007, the next line says so
        return at.replace(tzinfo=timezone.utc).timestamp()


class _Google:
    def __init__(self, server: str) -> None:
        self._server = server
        self._noticed_at: float | None = None

    def __call__(self) -> float | None:
        url = f"{self._server}/computeMetadata/v1/instance/preempted"
        if _text(url, {"Metadata-Flavor": "Google"}).strip() != "TRUE":
            return None
        self._noticed_at = self._noticed_at or time.time()  # the server says only that there is a notice
        return self._noticed_at + _GOOGLE_SECONDS


class _Azure:
    def __init__(self, server: str) -> None:
        self._server, self._name = server, ""

    def __call__(self) -> float | None:
        if not self._name:
            self._name = self._get("instance/compute/name?api-version=2021-02-01&format=text").strip()
        events = json.loads(self._get("scheduledevents?api-version=2020-07-01"))["Events"]
        ends = [event for event in events if event["EventType"] in _ENDS and self._name in event["Resources"]]
        return min((_begin(event["NotBefore"]) for event in ends), default=None)

    def _get(self, path: str) -> str:
        return _text(f"{self._server}/metadata/{path}", {"Metadata": "true"})


def _begin(text: str) -> float:
    """Return when an event of Azure begins at the earliest; "": it has begun."""
    return parsedate_to_datetime(text).timestamp() if text else time.time()


CLOUDS: Mapping[str, Callable[[str], Callable[[], float | None]]] = {"aws": _Aws, "gcp": _Google, "azure": _Azure}
"""By the setting: what asks a server when the machine will be taken away."""


def _text(url: str, headers: Mapping[str, str], method: str = "GET") -> str:
    """Ask the server, without a proxy: it answers this machine alone."""
    request = Request(url, headers=dict(headers), method=method)  # noqa: S310
    with contextlib.closing(build_opener(ProxyHandler({})).open(request, timeout=_ANSWER_SECONDS)) as answer:
        return str(answer.read().decode())
