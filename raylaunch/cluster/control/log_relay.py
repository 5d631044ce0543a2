"""Passes on what the agents of a run read of the log files on their nodes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace

from raylaunch.cluster.control.control_messages import ListLogs, LogsListed, LogsRead, ReadLogs
from raylaunch.cluster.fleet_api import Fleet
from raylaunch.core.history.run_status import NodeSummary, RunStatus
from raylaunch.core.newtypes import NodeId
from raylaunch.node.logs import log_files
from raylaunch.node.logs.log_files import LogAnswer, LogQuery, LogRead, LogSpan

ANSWER_SECONDS = 10.0
"""How long a node may take to answer; then it is left out."""
_MOST_READS = 16
"""Most reads for one answer, which go on at the same time, on one node or on several."""
_MOST_ATTEMPTS = 16
"""Most earlier attempts for which the relay remembers which node has the files of which rank."""


class LogRelay:
    """Asks the nodes. Several threads may use it.

    The present attempt's files are asked of the nodes that run its ranks. Those of earlier attempts are asked of all: a
    rank may have been on any of them, and nodes on one host, or with a shared disk, have the same files.
    """

    def __init__(self, source: Fleet, status: Callable[[], RunStatus]) -> None:
        self._source = source
        self._status = status
        #: By attempt: the node that reads the files of a rank.
        self._readers: dict[int, dict[int, NodeId]] = {}

    def spans(self, request: ListLogs) -> LogsListed:
        """Return the files that the nodes have, by rank."""
        status = self._status()
        query = request.query
        is_present = query.attempt == status.attempt
        asked: dict[NodeId, LogQuery | None] = {
            node.name: _of_node(query, node) if is_present else query
            for node in status.nodes
            if request.node in ("", node.name)
        }
        answers = {node: self._source.logs(node, each) for node, each in asked.items() if each is not None}
        futures.wait(answers.values(), ANSWER_SECONDS)
        found: dict[tuple[int, str], LogSpan] = {}
        readers: dict[int, NodeId] = {}
        missing = []
        for node, answer in answers.items():
            if (given := _given(answer)) is None:
                missing.append(str(node))
                continue
            for span in given.spans:
                if readers.setdefault(span.rank, node) == node:
                    found[span.rank, span.stream] = span
        self._remember(query.attempt, readers)
        return LogsListed(spans=tuple(found[key] for key in sorted(found, key=_by_rank)), missing=tuple(missing))

    def _remember(self, attempt: int, readers: dict[int, NodeId]) -> None:
        self._readers[attempt] = {**self._readers.get(attempt, {}), **readers}
        for oldest in sorted(self._readers)[:-_MOST_ATTEMPTS]:
            self._readers.pop(oldest, None)

    def blocks(self, request: ReadLogs) -> LogsRead:
        """Return what is at the beginning of these spans, in their order. What a node does not answer is left out."""
        readers = self._readers.get(request.attempt, {})
        rest = [span for span in request.spans if span.rank in readers]
        answers: list[Future[LogAnswer]] = []
        while rest and len(answers) < _MOST_READS:
            node, group = next(itertools.groupby(rest, key=lambda span: readers[span.rank]))
            of_node = list(group)
            part, later = _divided(of_node, log_files.BLOCK_BYTES)
            rest = [*later, *rest[len(of_node) :]]
            asked = LogRead(attempt=request.attempt, spans=tuple(part), times=request.times)
            answers.append(self._source.logs(node, asked))
        futures.wait(answers, ANSWER_SECONDS)
        given = filter(None, map(_given, answers))
        return LogsRead(blocks=tuple(block for answer in given for block in answer.blocks), rest=tuple(rest))


def _given(answer: Future[LogAnswer]) -> LogAnswer | None:
    """Return what a node has answered; None: nothing yet, or an error, or its agent has ended meanwhile."""
    with contextlib.suppress(Exception):
        return answer.result(timeout=0)
    return None


def _divided(spans: Sequence[LogSpan], size: int) -> tuple[list[LogSpan], list[LogSpan]]:
    """Divide spans into the first `size` bytes and the rest."""
    for index, span in enumerate(spans):
        if size < span.end - span.start:
            middle = span.start + size
            first = [replace(span, end=middle)] if size else []
            return [*spans[:index], *first], [replace(span, start=middle), *spans[index + 1 :]]
        size -= span.end - span.start
    return list(spans), []


def _by_rank(key: tuple[int, str]) -> tuple[int, bool]:
    return key[0], key[1] != "stdout"


def _of_node(query: LogQuery, node: NodeSummary) -> LogQuery | None:
    """Return what is asked of the ranks of a node; None: it has none of them."""
    if node.first_rank is None or not node.workers:
        return None
    last = node.first_rank + node.workers - 1
    wanted: Sequence[tuple[int, int]] = query.ranks if query.ranks is not None else ((node.first_rank, last),)
    both = [(max(first, node.first_rank), min(end, last)) for first, end in wanted]
    ranks = tuple((first, end) for first, end in both if first <= end)
    return replace(query, ranks=ranks) if ranks else None
