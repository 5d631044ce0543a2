"""The output of workers: their log files, the terminal, and the filters."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from tests.contract.launchers import SCRIPTS, Launcher, Run
from tests.contract.shared import log_folders

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

FRUITS = ("apple", "pear, green", "plum")


def terminal(text: str) -> list[str]:
    """Return the lines of the workers; lines of the launchers look different."""
    return sorted(line for line in text.splitlines() if re.search(r"(out|err) of \d$", line))


def test_tee_writes_to_files_and_to_the_terminal(runs: dict[str, Run]) -> None:
    """`--tee 3` writes each line unchanged to its worker's file, and with a prefix to the same stream of the terminal."""
    run = runs["static"]
    for stream, text in (("out", run.out), ("err", run.err)):
        lines = [f"[trainer {rank} rank{rank}]: {fruit} {stream} of {rank}" for rank in range(2) for fruit in FRUITS]
        assert terminal(text) == sorted(lines)
    for rank, folder in log_folders(run).items():
        assert (folder / "stdout.log").read_text() == "".join(f"{fruit} out of {rank}\n" for fruit in FRUITS)
        assert terminal((folder / "stderr.log").read_text()) == sorted(f"{fruit} err of {rank}" for fruit in FRUITS)


def test_only_the_jobs_words_are_on_stdout(runs: dict[str, Run]) -> None:
    run = runs["static"]
    assert sorted(run.out.splitlines()) == terminal(run.out)


def test_the_prefix_is_role_and_local_rank_unless_said_otherwise(runs: dict[str, Run]) -> None:
    assert "[default0]:out of 0" in runs["module"].out.splitlines()
    assert "[default0]:err of 0" in runs["module"].err.splitlines()


def test_redirects_write_to_files_alone(runs: dict[str, Run]) -> None:
    run = runs["command"]
    assert (terminal(run.out), terminal(run.err)) == ([], []), run.said
    for rank, folder in log_folders(run).items():
        assert (folder / "stdout.log").read_text() == f"out of {rank}\n"
        assert (folder / "stderr.log").read_text() == f"err of {rank}\n"


def test_each_local_rank_has_its_own_rule(runs: dict[str, Run]) -> None:
    """`--tee 0:3,1:1 --redirects 2:3,3:2 --local-ranks-filter 0,2,3` hides rank 1, and redirects rank 2 and half of 3."""
    run = runs["module"]
    assert [line[-8:] for line in terminal(run.out)] == ["out of 0", "out of 3"], run.said
    assert [line[-8:] for line in terminal(run.err)] == ["err of 0"], run.said
    folders = log_folders(run)
    for rank in (0, 1, 2):
        assert (folders[rank] / "stdout.log").read_text() == f"out of {rank}\n"
    for rank in (0, 2, 3):
        assert (folders[rank] / "stderr.log").read_text() == f"err of {rank}\n"


def test_what_no_flag_redirects(launcher: Launcher, runs: dict[str, Run]) -> None:
    """torchrun writes no file for it; raylaunch writes files for all output."""
    folders = log_folders(runs["module"])
    for path in (folders[1] / "stderr.log", folders[3] / "stdout.log"):
        assert path.exists() is launcher.ours


@pytest.mark.torchrun_has("--duplicate-stdout-filters")
def test_lines_that_match_a_filter_are_copied(runs: dict[str, Run]) -> None:
    """`apple,pear,, green` is two texts; one file contains the lines of all local ranks, with their prefixes."""
    (path,) = runs["static"].files("filtered_stdout.log")
    lines = [f"[trainer {rank} rank{rank}]: {fruit} out of {rank}" for rank in range(2) for fruit in FRUITS[:2]]
    assert sorted(path.read_text().splitlines()) == sorted(lines)
    assert runs["static"].files("filtered_stderr.log") == []


def test_the_layout_of_the_folder(runs: dict[str, Run]) -> None:
    """With `--log-dir`, the layout is: run, attempt (from 0), worker."""
    run = runs["static"]
    for rank, folder in log_folders(run).items():
        assert re.fullmatch(rf"logs/contract_\w+/attempt_0/{rank}", str(folder.relative_to(run.folder)))


@pytest.mark.raylaunch_only("has a temporary folder then")
def test_the_layout_of_the_run_folder(runs: dict[str, Run]) -> None:
    """Without `--log-dir`, the layout is: name of the job, run id, attempt (from 1), rank."""
    run = runs["elastic"]
    for rank, folder in log_folders(run).items():
        assert str(folder.relative_to(run.folder)) == f"runs/record/grows/attempt-1/rank-{rank}"


@pytest.fixture(scope="module")
def chatter(launcher: Launcher) -> Run:
    # On a busy machine, an agent that starts 32 workers may be silent for as long as a lost one.
    own = ("--set", "cpus_per_worker=0.2", "--set", "node_timeout=100")
    flags = (*("--nproc-per-node", 32, "--tee", 3), *launcher.either(own, ()))
    return launcher.run(*flags, "--log-dir", "logs", SCRIPTS / "lines.py")


STREAMS = {"out": "stdout.log", "err": "stderr.log"}


def thousands(stream: str) -> dict[int, list[str]]:
    return {rank: [f"{stream} {rank} {number}" for number in range(1000)] for rank in range(32)}


@pytest.mark.parametrize("stream", STREAMS)
def test_the_files_of_32_workers_have_all_their_lines(chatter: Run, stream: str) -> None:
    """Each worker writes a thousand lines, all at the same time."""
    assert chatter.code == 0, chatter.said
    texts = [path.read_text() for path in chatter.files(STREAMS[stream])]
    assert {int(text.split()[1]): text.splitlines() for text in texts} == thousands(stream)


@pytest.mark.raylaunch_only("its threads write into one stream: of 32000 lines hundreds are run together")
@pytest.mark.parametrize("stream", STREAMS)
def test_the_terminal_has_all_lines_of_32_workers(chatter: Run, stream: str) -> None:
    """The lines of each worker are in order."""
    assert "attempt 2" not in chatter.err, "they were started again"
    shown = defaultdict(list)
    for line in (chatter.out if stream == "out" else chatter.err).splitlines():
        if found := re.fullmatch(rf"\[default(\d+)\]:({stream} .*)", line):
            shown[int(found[1])].append(found[2])
    assert shown == thousands(stream)
