"""Asks the head of a Ray cluster (its GCS) who it is, before this process connects.

Ray itself would try for minutes to reach a head that is not there, and end this process if there is no token.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import ray

from raylaunch.cluster import ray_internals
from raylaunch.cluster.ray_internals import AuthenticationError
from raylaunch.errors import ClusterError

SECONDS = 5.0
"""How long the head may take to answer."""
_DEFAULT_PORT = 6379
_AUTH_HINT = "give its token in RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, with RAY_AUTH_MODE=token"
_MATCH_LEVEL = "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL"
"""Ray's own variable: with `minor`, the third number of Python's version may differ."""
_ILLEGAL = "the token has characters that are not printable ASCII, such as a line break"


def probe(address: str) -> dict[str, Any]:
    """Return the head's metadata, or raise ClusterError within seconds. Ray itself would try for 20 to 120 seconds."""
    if address.startswith("ray://"):
        msg = f"`{address}` is an address for Ray Client, which raylaunch does not use"
        raise ClusterError(msg, hint="run on a node of the cluster, or with `ray job submit`")
    if address.startswith(("http://", "https://")):
        msg = f"`{address}` is the address of Ray's jobs API, and raylaunch needs the cluster's own address"
        submit = f"to submit a job from here: `ray job submit --address {address} --working-dir . -- raylaunch ...`"
        raise ClusterError(msg, hint=f"{submit}\non a node of the cluster: set RAY_ADDRESS to `HOST:{_DEFAULT_PORT}`")
    host, _, port = address.rpartition(":") if ":" in address else (address, ":", str(_DEFAULT_PORT))
    if not host or not port.isdecimal():
        msg = f"`{address}` is not a Ray address: `host:port`, `auto` or `local` is expected"
        raise ClusterError(msg)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS).close()
    except OSError as error:
        msg = f"no Ray cluster at {address}: {error.strerror or error}"
        hint = "`ray status` on the head node tells whether it is up"
        if ":" not in address:
            hint = f"without a port, {port} is taken: is it `{address}:PORT` with another one?\n{hint}"
        raise ClusterError(msg, hint=hint) from None
    with _token_errors(address):
        _check_token()
    head = _ask_head(address)
    _check_versions(address, head)
    return head


def probe_as_auto(address: str) -> dict[str, Any]:
    """Like `probe`, with a token as `ray.init(address="auto")` uses it: if there is one, also without RAY_AUTH_MODE."""
    with _token_errors(address):
        ray_internals.use_token_if_there_is_one()
    return probe(address)


@contextlib.contextmanager
def _token_errors(address: str) -> Iterator[None]:
    """Turn Ray's error that there is no token, or none that can be sent, into a ClusterError."""
    try:
        yield
    except (AuthenticationError, UnicodeError) as error:
        text = str(getattr(error, "message", error))
        why = text.partition(". ")[0] if isinstance(error, AuthenticationError) else _ILLEGAL
        msg = f"no token can be sent to the Ray cluster at {address}: {why}"
        raise ClusterError(msg, hint=_AUTH_HINT) from None


def _check_token() -> None:
    """Raise AuthenticationError or UnicodeError for a token with which Ray's client would end this process."""
    token = ray_internals.token()
    if not (token.isascii() and token.isprintable()):
        raise AuthenticationError(_ILLEGAL)


def _check_versions(address: str, head: Mapping[str, Any]) -> None:
    """Raise ClusterError if the cluster has another Ray or Python than this process, which Ray itself would refuse.

    `head`: its metadata, by which each node that joined was compared too (`check_version_info` in Ray).
    """
    theirs = head.get("ray_version"), head.get("python_version")
    mine = ray.__version__, ".".join(map(str, sys.version_info[:3]))
    if None in theirs or head.get("ray_init_cluster"):
        return
    digits = 2 if os.environ.get(_MATCH_LEVEL) == "minor" else 3
    if theirs[0] != mine[0] or str(theirs[1]).split(".")[:digits] != mine[1].split(".")[:digits]:
        has = f"the Ray cluster at {address} has Ray {theirs[0]} and Python {theirs[1]}"
        msg = f"{has}, and this process has Ray {mine[0]} and Python {mine[1]}"
        raise ClusterError(msg, hint="both must be equal: run raylaunch in the environment that started Ray there")


def _ask_head(address: str) -> dict[str, Any]:
    """Return the head's metadata. Asked in a thread, since Ray's client waits half a minute for what is not Ray."""
    answer: list[dict[str, Any] | Exception] = []

    def ask() -> None:
        try:
            with _silenced():
                found = ray_internals.ask_head(address, b"CLUSTER_METADATA", b"cluster", SECONDS)
            answer.append(json.loads(found or b"{}"))
        except Exception as error:  # noqa: BLE001
            answer.append(error)

    thread = threading.Thread(target=ask, daemon=True, name="raylaunch-probe")
    thread.start()
    thread.join(SECONDS)
    if not answer:
        msg = f"the server at {address} does not answer as a Ray head node does"
        raise ClusterError(msg, hint="check the port: Ray's own is 6379 unless it was started with another")
    if isinstance(answer[0], AuthenticationError):
        msg = f"the Ray cluster at {address} refused our token"
        raise ClusterError(msg, hint=_AUTH_HINT)
    if isinstance(answer[0], Exception):
        msg = f"the Ray cluster at {address} cannot be used: {answer[0]}"
        raise ClusterError(msg)
    return answer[0]


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Keep Ray's C++ code from writing warnings to stderr; what matters is in the exception."""
    before = os.environ.get("RAY_BACKEND_LOG_LEVEL")
    os.environ["RAY_BACKEND_LOG_LEVEL"] = "fatal"
    try:
        yield
    finally:
        if before is None:
            del os.environ["RAY_BACKEND_LOG_LEVEL"]
        else:
            os.environ["RAY_BACKEND_LOG_LEVEL"] = before
