"""What a fork server imports of raylaunch itself, for scripts with `State`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.node.harness import MessagePipe, Node, basic_env

pytestmark = pytest.mark.timeout(300)

SAYS = """
import sys
say(*(f"raylaunch.worker.{name}" in sys.modules for name in ("state.elastic_state", "survivors.elastic_function")))
"""


@pytest.mark.parametrize("names", ["raylaunch", "another", None])
def test_workers_have_the_modules_of_state_if_the_script_may_use_them(
    tmp_path: Path, mark: str, pipe: MessagePipe, names: str | None
) -> None:
    """None: workers run no script."""
    node = Node(env=basic_env(mark), preload=())
    node.use_for_test(tmp_path, mark, pipe)
    script = node.script(f"import {names}.worker\n" if names else "", "named.py")
    node.set(kind="script" if names else "module", target=script)
    try:
        node.start()
        node.launch(node.script(SAYS))
        are_there = str(names != "another")
        assert pipe.read_lines() == [f"{are_there} {are_there}"]
    finally:
        node.supervisor.close()
