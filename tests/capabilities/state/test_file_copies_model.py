"""Whatever scripts, hosts and connections do: in the end the next node has all files of each node, as they are there."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylaunch.capabilities.state import file_copies
from raylaunch.node.state import transfer
from tests import profiles
from tests.capabilities.state.test_file_copies import Side, launch
from tests.node.harness import until

NODES = st.integers(0, 2)
NAMES = st.sampled_from(["model", "model", "model", "step-1/model"])
STEPS = st.one_of(
    st.tuples(st.just("save"), NODES, NAMES),
    st.tuples(st.just("overwrite"), NODES, NAMES),
    st.tuples(st.just("delete"), NODES, NAMES),
    st.tuples(st.just("launch"), st.permutations(range(3)), st.integers(2, 3)),
    st.tuples(st.just("retarget"), NODES, NODES),
    st.tuples(st.just("lose"), NODES, st.booleans()),
    st.tuples(st.just("refuse"), st.integers(1, 5), st.none()),
)


class World:
    """Three nodes, some of which have the ranks, and the number of connections that fail next."""

    def __init__(self) -> None:
        self._names = (f"node-{number}" for number in itertools.count())
        self._texts = map(str, itertools.count())
        self.sides = [Side(next(self._names)) for _ in range(3)]
        self.failing = 0
        self._attempt = 0
        self.targets: dict[str, tuple[Side, Side]] = {}
        self.launch(self.sides)

    def launch(self, sides: list[Side]) -> None:
        self._attempt += 1
        launch(self._attempt, *sides, peers=tuple(self.sides))
        self.targets = {one.name: (one, other) for one, other in zip(sides, (*sides[1:], sides[0]), strict=True)}

    def do(self, step: str, one: Any, two: Any) -> None:
        """Do a step. The arguments are those that `STEPS` draws."""
        match step:
            case "save":
                self.sides[one].write(two, next(self._texts))
            case "overwrite":
                with contextlib.suppress(FileNotFoundError):
                    path = Path(self.sides[one].folder.path, two)
                    path.parent.mkdir(exist_ok=True)
                    path.write_text(next(self._texts))
            case "delete":
                Path(self.sides[one].folder.path, two).unlink(missing_ok=True)
            case "launch":
                self.launch([self.sides[number] for number in one[:two]])
            case "retarget":
                side, target = self.sides[one], self.sides[two]
                if side is not target and side.name in self.targets:
                    side.copy_to(self._attempt, target.address)
                    self.targets[side.name] = side, target
            case "lose":
                self.sides[one].close()
                self.sides[one] = Side(next(self._names))
                self.launch(self.sides if two else [*self.sides[:one], *self.sides[one + 1 :]])
            case "refuse":
                self.failing = one

    def wait(self) -> None:
        """Wait until all files are copied."""
        until(self._is_copied, "copies", seconds=30)

    def _is_copied(self) -> bool:
        return all(one.files() == other.files(one.name) for one, other in self.targets.values())


@pytest.fixture
def impatient() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_copies, "_LOOK_SECONDS", 0.02)
        yield


@pytest.mark.usefixtures("impatient")
@profiles.examples(15)
@given(st.lists(st.tuples(STEPS, st.booleans()), min_size=8, max_size=30))
def test_in_the_end_all_files_are_copied(steps: list[tuple[tuple[str, Any, Any], bool]]) -> None:
    """After some steps, and after the last one, nothing is done until all is copied."""
    world, connect = World(), transfer.connection

    @contextlib.contextmanager
    def connection(*address: Any, **options: Any) -> Iterator[Any]:
        world.failing -= 1
        if world.failing >= 0:
            raise ConnectionRefusedError
        with connect(*address, **options) as line:
            yield line

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "connection", connection)
        try:
            for step, is_followed_by_a_pause in steps:
                world.do(*step)
                if is_followed_by_a_pause:
                    world.wait()
            world.wait()
        finally:
            for side in world.sides:
                side.close()
