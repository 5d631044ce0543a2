"""What ranks tell each other by the store of their attempt."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from raylaunch.worker.state import commit_agreement  # noqa: E402
from raylaunch.worker.state.commit_agreement import CommitAgreement, Proposal  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _first_store() -> None:
    """Make the first store of this process, with which torch opens a pipe that stays."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CommitAgreement]]:
    """Two ranks with a store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    found = [CommitAgreement(rank, 2, lambda: None) for rank in (0, 1)]
    yield found
    found.clear()


@pytest.mark.parametrize(
    "proposal",
    [
        Proposal(),
        Proposal(interval=70, light_interval=3),
        Proposal(to_disk=True),
        Proposal(is_kept=True, light_interval=1000),
    ],
)
def test_all_ranks_learn_what_rank_0_proposes(ranks, proposal):
    """Whatever the others would."""
    ranks[0].announce(1, proposal)
    assert not ranks[0].has_all()
    ranks[1].announce(1, Proposal(interval=9, to_disk=True, is_kept=True, light_interval=9))
    assert [rank.wait(1) for rank in ranks] == [proposal] * 2
    assert ranks[1].has_all()


def test_a_rank_that_is_alone_needs_no_store():
    alone = CommitAgreement(0, 1, lambda: None)
    proposal = Proposal(interval=3, light_interval=2)
    alone.announce(1, proposal)
    assert (alone.wait(1), alone.has_all(), alone.wait(0)) == (proposal, True, Proposal())


def test_rank_0_answers_the_first_rank_of_each_node(ranks):
    """It waits for all of them, and each for its answer."""

    def answers(words: list[str]) -> list[str]:
        return [f"{word} of {' '.join(words)}" for word in words]

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(rank.exchange, node, 2, f"word {node}", answers) for node, rank in enumerate(ranks)]
        assert [one.result(60) for one in found] == ["word 0 of word 0 word 1", "word 1 of word 0 word 1"]


def test_on_one_node_the_first_rank_answers_itself():
    """Of a world of several ranks, which have a store."""
    assert CommitAgreement(0, 4, lambda: None).exchange(0, 1, "a", lambda words: [words[0] * 2]) == "aa"


class Told(SimpleQueue):
    """A stream for one thread, which another one reads: `capsys` may lose what is written while it is read."""

    write = SimpleQueue.put

    def flush(self) -> None:
        pass


def test_a_node_that_does_not_come_is_told_of(ranks, monkeypatch):
    monkeypatch.setattr(commit_agreement, "_PATIENCE", 0.05)
    monkeypatch.setattr("sys.stderr", told := Told())
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(ranks[0].exchange, 0, 2, "a", lambda words: words)
        said = told.get(timeout=60)
        ranks[1].exchange(1, 2, "b", lambda words: words)
        assert found.result(60) == "a"
    assert said == "raylaunch: rank 0 waits in `State.restore`, since 1 of 2 nodes have not come there"
