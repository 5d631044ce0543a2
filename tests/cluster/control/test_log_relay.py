"""Which node is asked for the logs of which rank."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from raylaunch.cluster.control import log_relay
from raylaunch.cluster.control.control_messages import ListLogs, LogsListed, ReadLogs
from raylaunch.cluster.control.log_relay import LogRelay
from raylaunch.core.history.run_status import NodeState, NodeSummary, StatusBuilder
from raylaunch.core.job.job import Job
from raylaunch.node.logs import log_files
from raylaunch.node.logs.log_files import LogAnswer, LogQuery, LogRead


@dataclass
class Nodes:
    """Nodes, each with a folder, and two ranks of the second attempt."""

    folders: dict[str, Path]
    asked: list[tuple[str, object]] = field(default_factory=list)
    silent: str = ""
    ended: str = ""

    def logs(self, node: str, asked: LogQuery | LogRead) -> Future[LogAnswer]:
        self.asked.append((node, asked))
        answer: Future[LogAnswer] = Future()
        if node == self.ended:
            answer.cancel()
        elif node != self.silent:
            answer.set_result(log_files.answer(str(self.folders[node]), "raylaunch", asked))
        return answer

    def status(self):
        nodes = [
            NodeSummary(
                name=name,
                address="10.0.0.1",
                state=NodeState.RUNNING,
                draining=False,
                workers=2,
                first_rank=2 * number,
                pids=(),
            )
            for number, name in enumerate(self.folders)
        ]
        return replace(StatusBuilder(Job()).status(), attempt=2, nodes=tuple(nodes))


def write(folder: Path, attempt: int, rank: int, text: str) -> None:
    where = folder / f"attempt-{attempt}" / f"rank-{rank}"
    where.mkdir(parents=True)
    (where / "stdout.log").write_text(text)


@pytest.fixture(params=["own disks", "shared disk"])
def nodes(request, tmp_path) -> Nodes:
    """In the first attempt the ranks were the other way round."""
    shared = request.param == "shared disk"
    found = Nodes({f"node-{number}": tmp_path / ("all" if shared else str(number)) for number in (1, 2)})
    for attempt, ranks in ((1, (2, 3, 0, 1)), (2, (0, 1, 2, 3))):
        for number, rank in enumerate(ranks):
            write(found.folders[f"node-{number // 2 + 1}"], attempt, rank, f"{attempt}.{rank};" * 3)
    return found


def read(relay: LogRelay, listed: LogsListed, attempt: int) -> str:
    spans, found = listed.spans, b""
    while spans:
        answer = relay.blocks(ReadLogs(attempt=attempt, spans=spans))
        spans, found = answer.rest, found + b"".join(block.data for block in answer.blocks)
    return found.decode()


@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("most", [1, 7, log_files.BLOCK_BYTES])
def test_the_files_of_all_nodes(nodes, monkeypatch, attempt, most):
    """By rank, each once, in whatever parts they come."""
    monkeypatch.setattr(log_files, "BLOCK_BYTES", most)
    relay = LogRelay(nodes, nodes.status)
    listed = relay.spans(ListLogs(query=LogQuery(attempt=attempt, streams=("stdout", "stderr"))))
    assert ([span.rank for span in listed.spans], listed.missing) == ([0, 1, 2, 3], ())
    assert read(relay, listed, attempt) == "".join(f"{attempt}.{rank};" * 3 for rank in range(4))


def test_much_is_read_in_parts_that_do_not_wait_for_each_other(nodes, monkeypatch):
    """Several reads of one node go on at a time, and what they read comes in order."""
    monkeypatch.setattr(log_files, "BLOCK_BYTES", 5)
    monkeypatch.setattr(log_relay, "_MOST_READS", 8)
    relay = LogRelay(nodes, nodes.status)
    listed = relay.spans(ListLogs(query=LogQuery(attempt=2, streams=("stdout",))))
    del nodes.asked[:]
    answer = relay.blocks(ReadLogs(attempt=2, spans=listed.spans))
    assert [sum(span.end - span.start for span in asked.spans) for _, asked in nodes.asked] == [5, 5, 5, 5, 4, 5, 5, 5]
    text = b"".join(block.data for block in answer.blocks).decode()
    assert text + read(relay, replace(listed, spans=answer.rest), 2) == "".join(f"2.{n};" * 3 for n in range(4))


def test_only_those_who_have_a_rank_are_asked(nodes):
    """In the present attempt."""
    relay = LogRelay(nodes, nodes.status)
    listed = relay.spans(ListLogs(query=LogQuery(attempt=2, streams=("stdout",), ranks=((1, 1),))))
    assert [name for name, _ in nodes.asked] == ["node-1"]
    assert read(relay, listed, 2) == "2.1;" * 3
    listed = relay.spans(ListLogs(query=LogQuery(attempt=2, streams=("stdout",)), node="node-2"))
    assert [span.rank for span in listed.spans] == [2, 3]


@pytest.mark.parametrize("how", ["silent", "ended"])
def test_a_node_that_does_not_answer(nodes, monkeypatch, how):
    """Or whose agent ends meanwhile. It is named, and the others are shown. What it was to read is left out."""
    monkeypatch.setattr(log_relay, "ANSWER_SECONDS", 1.0)
    relay = LogRelay(nodes, nodes.status)
    query = ListLogs(query=LogQuery(attempt=2, streams=("stdout",)))
    every = relay.spans(query)
    setattr(nodes, how, "node-1")
    assert read(relay, every, 2) == "2.2;" * 3 + "2.3;" * 3
    listed = relay.spans(query)
    assert ([span.rank for span in listed.spans], listed.missing) == ([2, 3], ("node-1",))
