"""Whatever workers write and raise, and in whatever locale: a run ends as its workers do, without an error of ours."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylaunch.cli.output.console import Console
from raylaunch.cli.output.report import report
from raylaunch.core.failures import error_file
from raylaunch.core.failures.failure import Failure
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import NodeJoined, NodeLost, WorkersExited, WorkersStarted
from raylaunch.core.placement.plan import NodeFacts, make_plan
from raylaunch.core.record import journal
from raylaunch.core.record import result as results
from raylaunch.errors import JOB_FAILURES, ExitCode
from tests import profiles
from tests.worker import any_worker

SCRIPT = Path(any_worker.__file__)
PACKAGE = Path(journal.__file__).parents[2]
PROGRAM = (
    "import sys; from raylaunch.cluster.session import discovery; discovery.running = lambda *_: []; "
    "from raylaunch.cli.main import main; sys.exit(main())"
)
"""The command, which does not see the Rays of other tests on this machine."""
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")

any_character = st.characters(exclude_categories=())
nasty = st.sampled_from(
    ["\x1b[2J", "\r", "\n", "\x07", "\x9b", "\u202e", "\udce9", "\ud83d", "é", "gloo ", "://a:", "'", "\0"]
)
any_text = st.lists(nasty | st.text(any_character, max_size=20), max_size=8).map(
    lambda parts: "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
)
"""Two halves of a surrogate pair side by side are one character, as they become in JSON."""


@profiles.examples(60)
@given(st.tuples(*[any_text] * 9), st.integers(-70, 300), st.sampled_from(["utf-8", "ascii", "latin-1"]))
def test_any_text_can_be_shown(texts, code, encoding):
    """In the terminal of any locale, as lines of printable characters; and written down, and read again."""
    kind, message, trace, tail, host, address, why, name, folder = texts
    job = Job(entrypoint=Entrypoint(script="train.py", args=[message, "--token", tail]), name=name)
    node = NodeFacts(node_id="a", address=address, cpus=4.0, gpus=0.0, free_cpus=4.0, free_gpus=0.0)
    error = error_file.parse(
        json.dumps({"message": {"message": f"{kind}: {message}", "extraInfo": {"py_callstack": trace}}})
    )
    place = {"attempt": 1, "node": "node-1", "rank": 0, "local_rank": 0, "pid": 1, "at": 2.0, "exit_code": code}
    failure = Failure(**place, error=error, evidence=why, tail=tail, host=host, stderr=folder, error_file=folder)
    entries = journal.replay(
        job,
        [
            NodeJoined(at=0.0, node="node-1", address=address, nproc=1),
            WorkersStarted(at=1.0, attempt=1, node="node-1", pids=(1,)),
            WorkersExited(at=2.0, attempt=1, node="node-1", failures=(failure,)),
            NodeLost(at=3.0, node="node-1", why=why),
        ],
    )
    stderr = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        shown = Console()
        shown.on_plan(job, make_plan(job, [node], local=False), folder)
        machine = journal.Machine(job)
        machine.start()
        for entry in entries:
            if entry.event is not None:
                machine.handle(entry.event)
            shown.on_entry(entry, machine)
        found = results.result(entries, run_dir=folder)
        shown.report(report(found), ok=found.ok)
        shown.close()
    text = stderr.buffer.getvalue().decode(encoding)
    assert not UNPRINTABLE.search(text)
    assert all(line.startswith("raylaunch: ") for line in text.partition("\nerror: ")[0].splitlines() if line)
    lines = [journal.header(job, ""), *map(journal.line, entries)]
    assert journal.read(lines) == (job, entries)
    assert json.loads(json.dumps(results.facts(found)))["exit_code"] == found.exit_code


writes = st.tuples(st.sampled_from([1, 2]), st.binary(max_size=60).map(bytes.hex), st.sampled_from([1, 1, 5000]))
behaviours = st.fixed_dictionaries(
    {
        "writes": st.lists(writes, max_size=4),
        "way": st.sampled_from(sorted(any_worker.WAYS)),
        "text": any_text,
        "times": st.sampled_from([1, 1, 1, 20, 4000]),
    }
)
attempts = st.lists(st.lists(behaviours, min_size=3, max_size=3), min_size=3, max_size=3)
locales = st.sampled_from([{}, {"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}, {"LC_ALL": "C.UTF-8"}])
flags = st.tuples(
    st.sampled_from(["--show=all", "--show=raw", "--show=none", "--show=1"]),
    st.sampled_from(["--event-log-handler=null", "--event-log-handler=console"]),
    st.sampled_from(["--start-method=forkserver", "--start-method=spawn"]),
)


@pytest.mark.skipif(not profiles.is_fuzzing(), reason="each case takes seconds; `make fuzz` draws some")
@profiles.examples(2)
@given(attempts, locales, flags, st.binary(max_size=30).map(lambda data: data.replace(b"\0", b"")))
def test_a_run_with_any_output(behaviour, locale, flag, argument):
    """Three workers and two restarts: the exit code is a job's, stderr has no traceback of ours, nothing hangs."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(SCRIPT, folder)
        Path(folder, "behaviour.json").write_text(json.dumps(behaviour))
        code, stderr = run(folder, [*flag, "--nproc-per-node=3", "--max-restarts=2", SCRIPT.name, argument], locale)
    assert code in (ExitCode.OK, *JOB_FAILURES), stderr
    assert "bug in raylaunch" not in stderr
    assert f'File "{PACKAGE}/raylaunch/' not in stderr


def run(folder: str, arguments: list[str | bytes], locale: dict[str, str]) -> tuple[int, str]:
    """Return exit code and stderr of a run on this machine, of whose end nothing may be left after some minutes."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "LC_", "PYTHON"))}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=folder,
        env=env | locale | {"TMPDIR": folder},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        stderr = process.communicate(timeout=250)[1]
    finally:
        process.send_signal(signal.SIGKILL)
    return process.returncode, stderr.decode(errors="replace")
