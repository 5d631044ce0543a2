"""Asks the driver of a run over HTTP, for commands such as `raylaunch stop`."""

from __future__ import annotations

import contextlib
import socket
import time
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

import msgspec

from raylaunch.cluster.control.control_messages import ControlRequest, RefusedError
from raylaunch.node.protocol.acceptor import SecretAddress

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 20.0
RETRY_SECONDS = (0.1, 0.3, 0.6, 0.0)
"""The pause after each connection that was closed instead of admitted: strangers may have taken its place."""


class ControlError(Exception):
    """The driver of a run cannot be asked; why, for a person."""

    def __init__(self, why: str, *, is_gone: bool = False) -> None:
        super().__init__(why)
        #: Whether no process listens there any more: the driver is gone.
        self.is_gone = is_gone


class ControlClient:
    """A connection to the driver of a run. One thread may use it at a time."""

    def __init__(self, address: SecretAddress) -> None:
        """Connect. Raises ControlError."""
        self._headers = {"Authorization": f"Bearer {address.secret}"}
        self._line = HTTPConnection(address.host, address.port, timeout=CONNECT_SECONDS)
        where = f"{address.host} port {address.port}"
        for pause in RETRY_SECONDS:
            try:
                self._line.connect()
                response = self._response("GET", "/")
                response.read()
                if response.status == HTTPStatus.OK:
                    self._line.sock.settimeout(ANSWER_SECONDS)
                    return
            except ConnectionRefusedError:
                raise ControlError(f"nobody listens at {where}", is_gone=True) from None
            except (ConnectionError, HTTPException):
                pass  # it was closed instead of admitted
            except OSError as error:
                raise ControlError(f"{where} cannot be reached: {error.strerror or error}") from None
            self.close()
            time.sleep(pause)
        raise ControlError(f"{where} does not answer as the driver of this run", is_gone=True)

    def _response(self, method: str, path: str, body: bytes | None = None) -> HTTPResponse:
        self._line.request(method, path, body, self._headers)
        return self._line.getresponse()

    def ask(self, request: ControlRequest) -> Any:
        """Return the answer. Raises ControlError and RefusedError."""
        try:
            response = self._response("POST", request.PATH, msgspec.json.encode(request))
            body = response.read()
            if response.status != HTTPStatus.OK:
                raise RefusedError(*_refusal(body))
            return msgspec.json.decode(body, type=request.ANSWER)
        except (HTTPException, ConnectionError):
            msg = "the driver has closed the connection"
            raise ControlError(msg, is_gone=not self._listens()) from None
        except (OSError, msgspec.MsgspecError) as error:
            raise ControlError(str(error)) from None

    def _listens(self) -> bool:
        """Return whether anybody listens there: it may have closed a connection for the sake of other clients."""
        try:
            socket.create_connection((self._line.host, self._line.port), CONNECT_SECONDS).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the connection."""
        self._line.close()


def _refusal(body: bytes) -> tuple[str, str]:
    """Return why a request was refused, and what would help."""
    with contextlib.suppress(msgspec.MsgspecError):
        found = msgspec.json.decode(body, type=dict[str, str])
        return found.get("why", ""), found.get("hint", "")
    return body.decode(errors="replace"), ""
