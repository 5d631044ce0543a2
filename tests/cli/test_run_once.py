"""How the process ends after a run."""

from __future__ import annotations

import errno
import importlib.util
import io
import os
import sys
from types import SimpleNamespace

import pytest

from raylaunch.cli import run_once
from raylaunch.cluster import session
from raylaunch.errors import ConfigError, ExitCode, InterruptedByUserError

RAY_SESSION = "raylaunch.cluster.session.ray_session"


@pytest.mark.parametrize("is_abandoned", [False, True])
def test_a_connection_to_ray_that_does_not_close_does_not_delay_the_exit(monkeypatch, is_abandoned):
    """The process then ends without the interpreter's own cleanup, which would wait for the connection."""
    ended = []
    assert importlib.util.find_spec(RAY_SESSION), "the module by whose name run_once finds the connection"
    fake = SimpleNamespace(is_abandoned=lambda: is_abandoned)
    monkeypatch.setitem(sys.modules, RAY_SESSION, fake)
    monkeypatch.setattr(session, "ray_session", fake, raising=False)
    monkeypatch.setattr(os, "_exit", ended.append)
    assert run_once.leave(3) == 3
    assert ended == [3] * is_abandoned


def test_without_ray_the_process_ends_as_usual(monkeypatch):
    """Ray is not imported just to ask."""
    monkeypatch.delitem(sys.modules, RAY_SESSION, raising=False)
    assert run_once.leave(0) == 0
    assert RAY_SESSION not in sys.modules


@pytest.mark.parametrize("error", [ConfigError("wrong"), InterruptedByUserError("stopped"), ZeroDivisionError()])
def test_an_error_message_that_cannot_be_written_does_not_change_the_exit_code(monkeypatch, error):
    """Stderr may be a terminal that is gone, or a file on a full disk."""

    def fail() -> int:
        raise error

    class Gone(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(sys, "stderr", Gone())
    assert run_once.exit_code_of(fail) == getattr(error, "exit_code", ExitCode.INTERNAL)
