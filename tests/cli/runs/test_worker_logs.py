"""The files of workers: their last lines, and what is written to them later."""

from __future__ import annotations

import re

from raylaunch.cli.runs.run_reader import RunReader
from raylaunch.cli.runs.worker_logs import AttemptLogs, LogChoice
from raylaunch.cluster.driver.run_registry import RegisteredRun


def logs(folder, **settings: object) -> AttemptLogs:
    """Return the files of the second attempt, which has 11 ranks."""
    every = {"streams": ("stdout", "stderr"), "ranks": None, "lines": None}
    return AttemptLogs(
        RunReader(RegisteredRun(id="x", name="x", folder=str(folder))), LogChoice(**{**every, **settings}), 2, 11
    )


def test_what_is_written_later(tmp_path):
    """Whole lines come as they are written, with any bytes in them; the rest comes at the end. Others are left out."""
    found = logs(tmp_path, pattern=re.compile(b"a"))
    assert (list(found.last(whole=False)), list(found.more()), found.is_empty) == ([], [], True)
    where = tmp_path / "attempt-2" / "rank-3"
    where.mkdir(parents=True)
    with (where / "stdout.log").open("wb", buffering=0) as file:
        for data, expected in ((b"a1\nb", [b"[3] a1\n"]), (b"a\rxx\n", [b"[3] ba\r"]), (b"\xffa", [])):
            file.write(data)
            assert list(found.more()) == expected
    assert ([*found.rest()], [*found.rest()]) == ([b"[3] \xffa\n"], [b""])


def test_ranks_and_prefixes(tmp_path):
    """Without prefix where one rank is shown."""
    for rank in (10, 2):
        (tmp_path / f"attempt-2/rank-{rank}").mkdir(parents=True)
        (tmp_path / f"attempt-2/rank-{rank}/stdout.log").write_text("x\ny")

    def shown(**settings: object) -> list[bytes]:
        return list(logs(tmp_path, **settings).last(whole=True))

    assert shown() == [b"[2] x\n", b"[2] y\n", b"[10] x\n", b"[10] y\n"]
    assert shown(ranks=(range(5, 11),), lines=1) == [b"[10] y\n"]
    assert shown(ranks=(range(2, 3),), pattern=re.compile(b"x")) == [b"x\n"]
    assert shown(is_prefixed=False, lines=1) == [b"y\n", b"y\n"]
    assert shown(streams=("stderr",)) == []
