"""What is typed reaches the worker once, in order, and no worker of another attempt."""

from __future__ import annotations

import asyncio
import contextlib
import os
from types import SimpleNamespace

from msgspec import msgpack

from raylaunch.capabilities.terminal.agent import (
    TerminalGoal,
    TerminalInput,
    TerminalSpec,
    WorkerTerminal,
)
from raylaunch.capabilities.terminal.driver import TerminalKeys
from raylaunch.worker.runtime.spec import WorkerSpec
from tests.fakes import agent_port, driver_port

SPEC = TerminalSpec(rank=1, columns=80, lines=24, is_debugged=True)


class Keyboard:
    """Types what a test tells it to."""

    spec = SPEC

    @contextlib.contextmanager
    def connected(self, tell):
        self.type = lambda *keys: [tell(TerminalInput(data=data)) for data in keys]
        yield


def keys():
    """Return a driver's part, its keyboard, and what it shows to nodes."""
    shown, keyboard = [], Keyboard()
    port = driver_port(
        machine=SimpleNamespace(roster=("a", "b")),
        show=lambda node, section: shown.append((node, msgpack.decode(section, type=TerminalGoal))),
        call=lambda work: work(),
    )
    return TerminalKeys(keyboard, port), keyboard, shown


def test_the_newest_keys_are_shown_to_each_node_in_order():
    part, keyboard, shown = keys()
    with part.running():
        keyboard.type(*(b"%d" % number for number in range(99)))
    assert [node for node, _ in shown[-2:]] == ["a", "b"]
    assert [(number, typed.data) for number, typed in shown[-1][1].inputs] == [
        (number + 1, b"%d" % number) for number in range(35, 99)
    ]


def test_what_was_typed_for_the_last_attempt_is_not_shown_to_the_next():
    part, keyboard, shown = keys()
    with part.running():
        keyboard.type(b"old")
        part.launched(1.0)
        keyboard.type(b"new")
    assert [(number, typed.data) for number, typed in shown[-1][1].inputs] == [(2, b"new")]


def test_a_node_that_is_shown_keys_again_passes_only_new_ones_on(tmp_path):
    async def check() -> None:
        terminal = WorkerTerminal(SPEC, agent_port(put_output=lambda _: None, is_full=lambda: False))
        common = {"kind": "script", "target": "x.py", "cwd": "", "env": {}, "title": "", "local_rank": 0}
        specs = tuple(WorkerSpec(rank=rank, stdout=str(tmp_path / str(rank)), stderr="", **common) for rank in range(2))
        other, mine = terminal.workers(None, specs)
        assert (other.terminal, mine.takes_input, mine.timeout) == ("", True, 7 * 86_400.0)
        typed = [(number, TerminalInput(data=b"%d\n" % number)) for number in (1, 2, 3)]
        for several in (typed[:1], typed[:2], typed[:2], typed[:1], typed):
            terminal.shown(msgpack.encode(TerminalGoal(inputs=tuple(several))))
        worker = os.open(mine.terminal, os.O_RDWR | os.O_NOCTTY)
        assert [os.read(worker, 9) for _ in range(3)] == [b"1\n", b"2\n", b"3\n"]
        os.close(worker)
        terminal.close()

    asyncio.run(check())
