"""The other end of a control connection, in a command such as `raylaunch stop`."""

from __future__ import annotations

import contextlib
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

from raylaunch.cluster.control import control_frames
from raylaunch.cluster.control.control_frames import BUSY, MOST_CLIENTS
from raylaunch.cluster.control.control_messages import (
    ControlAnswer,
    ControlRequest,
    GetState,
    Refused,
    RunState,
)
from raylaunch.node.protocol.acceptor import SecretAddress

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 20.0
RETRY_SECONDS = (0.1, 0.3, 0.6, 0.0)
"""The pause after each connection that was closed instead of admitted: strangers may have taken its place, or it is
busy."""


class ControlError(Exception):
    """The driver of a run cannot be asked; why, for a person."""

    def __init__(self, why: str, *, is_gone: bool = False) -> None:
        super().__init__(why)
        #: Whether no process listens there any more: the driver is gone.
        self.is_gone = is_gone


class RefusedError(Exception):
    """The driver does not do what was asked; why, and what would help, for a person."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.why)
        self.hint = refused.hint


class DriverClient(ABC):
    """Asks the driver of a run."""

    @abstractmethod
    def ask(self, request: ControlRequest) -> Iterator[ControlAnswer]:
        """Yield the answers, all of which must be taken. Raises ControlError and RefusedError."""

    @abstractmethod
    def close(self) -> None:
        """End the connection, if there is one."""

    def state(self, wait: float = 0.0) -> RunState:
        """Return where the run is; see `GetState`. Raises ControlError and RefusedError."""
        (answer,) = self.ask(GetState(wait=wait))
        if not isinstance(answer, RunState):
            msg = f"the driver answers with {type(answer).__name__}"
            raise ControlError(msg)
        return answer


class ControlClient(DriverClient):
    """A connection to the driver of a run. One thread may use it at a time."""

    def __init__(self, address: SecretAddress, name: str = "client") -> None:
        """Connect. `name`: the command's name, for the driver's list of threads. Raises ControlError."""
        is_busy = False
        for pause in RETRY_SECONDS:
            self._line = _connected(address)
            self._file = self._line.makefile("rb")
            with contextlib.suppress(OSError):
                self._line.sendall(f"{address.secret} {name}\n".encode())
                answer = self._file.read(1)
                if answer == b"+":
                    self._line.settimeout(ANSWER_SECONDS)
                    return
                is_busy = answer == BUSY
            self.close()
            time.sleep(pause)
        if is_busy:
            raise ControlError(f"it serves {MOST_CLIENTS} commands already, and no more at a time; try again")
        msg = f"{address.host} port {address.port} does not answer as the driver of this run"
        raise ControlError(msg, is_gone=True)

    def ask(self, request: ControlRequest) -> Iterator[ControlAnswer]:
        """Yield the answers, all of which must be taken. Raises ControlError and RefusedError."""
        try:
            self._line.sendall(control_frames.dump(request))
            while (answer := control_frames.load_answer(self._file)) is not None:
                if isinstance(answer, Refused):
                    control_frames.load_answer(self._file)
                    raise RefusedError(answer)
                yield answer
        except (EOFError, ConnectionError):
            msg = "the driver has closed the connection"
            raise ControlError(msg, is_gone=True) from None
        except (OSError, ValueError) as error:
            raise ControlError(str(error)) from None

    def close(self) -> None:
        """Close the connection to the driver, and the file that reads from it."""
        with contextlib.suppress(OSError):
            self._file.close()
            self._line.close()


def _connected(address: SecretAddress) -> socket.socket:
    try:
        return socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS)
    except ConnectionRefusedError:
        msg = f"nobody listens at {address.host} port {address.port}"
        raise ControlError(msg, is_gone=True) from None
    except OSError as error:
        why = error.strerror or str(error)
        raise ControlError(f"{address.host} port {address.port} cannot be reached: {why}") from None
