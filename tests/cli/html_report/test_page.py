"""The page: what it says, that it needs nothing else, and that nothing in it is run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from raylaunch.core.failures.failure import WorkerError
from raylaunch.core.failures.stacks import StackGroup
from raylaunch.core.machine.events_and_actions import DriverReplaced, WorkersHung
from raylaunch.core.record.journal import JournalEntry
from tests.cli.html_report.reports import (
    Page,
    done,
    failed_run,
    html,
    many_nodes,
    replay_folder,
    restarted_often,
    write_journal,
)

HOSTILE = "</pre><script>alert(1)</script>\x1b[31mred\x1b[0m\x00\u202e\" onload='x' {{ 7 * 7 }} &lt; \udcff"
MOST_BYTES = 2_000_000
_PROBE = """<!DOCTYPE html><title>not loaded</title><body><script>
const frame = document.createElement("iframe");
frame.style = "width: 400px; height: 800px; border: 0";
frame.onload = () => {
  const page = frame.contentDocument.documentElement;
  document.title = page.scrollWidth <= page.clientWidth ? "it fits" : "it is too wide";
};
frame.srcdoc = %s;
document.body.append(frame);
</script>"""
"""A page that shows a report at a width that a browser's window cannot have, and says how wide the report is."""


def test_a_failed_run(tmp_path):
    """What happened, why and what to do come first; then the root cause with the last lines."""
    error = WorkerError(type="ValueError", message="loss is NaN", traceback='  File "t.py", line 3\nValueError: loss')
    entries = failed_run(exit_code=1, error=error, tail="step 40\nloss nan\n", stderr="/runs/rank-1/stderr.log")
    found = Page(html(write_journal(tmp_path, entries, nproc_per_node=2), done(1, entries[-1].actions[1].why)))
    assert found.words("outcome") == (
        "✗ The run failed: rank 1 raised ValueError: loss is NaN It was not restarted: no restarts were asked for. "
        "What to do next raylaunch logs run-1 --failed prints what this rank has written. Exit code 1"
    )
    cause = found.words("cause")
    assert 'Exception File "t.py", line 3 ValueError: loss' in cause
    assert "Last lines of its stderr step 40 loss nan" in cause
    assert "node-1 (node-1, 10.0.0.1)" in cause
    assert "9.0 s after the beginning, 2026-01-01 12:00:09+00:00, in attempt 1" in cause
    assert "train5.0 s · 56% start4.0 s · 44%" in found.words("time")
    assert found.words("rates").startswith("Steps per second 0 to 10 per second")
    assert found.words("nodes").startswith("Nodes node-110.0.0.1, 1 failure")
    assert "1 ■ rank 1 on node-1 raised ValueError" in found.words("attempts") or "✕ rank 1" in found.words("attempts")
    assert found.words("job").startswith(
        f"The job Run it again, from the same folder: raylaunch {tmp_path}/job.yaml entrypoint.script train.py nproc_per_node 2"
    )
    assert found.words("versions") == "Versions raylaunch 0.1.0 Of the machine where the command ran."
    assert [*found.sections][:2] == ["outcome", "cause"]


def test_texts_with_code(tmp_path):
    """What is between backticks is code, also if it is hostile; the rest is text."""
    text = html(write_journal(tmp_path, failed_run()), done(1, "write `<b>` or `x"))
    assert "Write <code>&lt;b&gt;</code> or <code>x.</code>" in text


def test_the_end_of_the_output(tmp_path):
    """The last lines of rank 0, of a progress bar what it showed last; a failed run has its stderr instead."""
    folder = write_journal(tmp_path, [*failed_run()[:-1]])
    (folder / "attempt-1" / "rank-0").mkdir(parents=True)
    lines = "".join(f"line {number}\n" for number in range(40))
    (folder / "attempt-1" / "rank-0" / "stdout.log").write_bytes(lines.encode() + b"1%\r100%\r\n\xff\n")
    found = Page(html(folder)).words("output")
    assert found == f"Last lines of rank 0 {' '.join(f'line {number}' for number in range(31, 40))} 100% \ufffd"
    write_journal(tmp_path, failed_run())
    assert "Last lines of rank 0" not in html(folder, done(1, failed_run()[-1].actions[1].why))


def test_a_run_with_restarts_and_hangs(tmp_path):
    """Each restart with its parts, and what workers did when they hung."""
    found = Page(html(replay_folder(tmp_path, "chaos-on-hosts"), done(0, "all 8 workers finished")))
    assert found.words("outcome") == "✓ The run succeeded All 8 workers finished. Exit code 0"
    assert "Restarts37" in "".join(found.text.split())
    assert "node lost" in found.text
    assert "detect 0.08 s 5.1 s 37.0 s" in found.words("restarts")
    assert "◆ hang" in found.words("restarts")
    assert "Attempt 19, after 1 min 27 s: rank 3 on node-20 hung" in found.words("hangs")
    assert "most often" not in found.words("slow")
    assert found.words("slow").startswith("Slow ranks rank node furthest behind")


def test_takeovers(tmp_path):
    """Each with the seconds of its phases; a run without any has no section."""
    taken = DriverReplaced(
        at=6.0, driver=2, process_seconds=0.9, state_seconds=0.1, prepare_seconds=0.0, agents_seconds=0.2
    )
    entries = failed_run()
    found = Page(html(write_journal(tmp_path, [*entries[:-1], JournalEntry(event=taken, actions=()), entries[-1]])))
    assert "2 6.0 s 0.90 s 0.10 s 0 0.20 s 1.2 s" in found.words("takeovers")
    assert "takeovers" not in Page(html(write_journal(tmp_path / "without", entries))).sections


def test_nothing_foreign_is_run(tmp_path):
    """Whatever a name, an exception, a log line, a stack or a reason is made of."""
    error = WorkerError(type="Bad" + HOSTILE, message=HOSTILE, traceback=HOSTILE + "x" * 16_000)
    entries = failed_run(error=error, exit_code=1, tail=HOSTILE * 40, host=HOSTILE, stderr=HOSTILE)
    group = StackGroup(ranks=(1,), frames=(HOSTILE, HOSTILE), note=HOSTILE)
    hung = WorkersHung(at=8.5, attempt=1, failures=entries[-1].event.failures, groups=(group,))
    entries.insert(-1, JournalEntry(event=hung, actions=()))
    joined = replace(entries[1].event, address=HOSTILE)
    entries[1] = JournalEntry(event=joined, actions=(replace(entries[1].actions[0], why=HOSTILE),))
    folder = write_journal(tmp_path, entries, name=HOSTILE, env={HOSTILE: HOSTILE})
    text = html(folder, done(1, HOSTILE + "y" * 65_536))
    found = Page(text)
    assert {tag for tag, _ in found.tags}.isdisjoint({"script", "iframe", "object", "embed", "base", "form"})
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", text)
    assert "</pre><script>alert(1)</script>\\x1b[31mred" in found.sections["cause"]
    assert "{{ 7 * 7 }}" in found.sections["cause"]
    assert len(text) < 200_000


def test_it_needs_no_network(tmp_path):
    """Nothing is loaded from elsewhere, and the page forbids it."""
    found = Page(html(replay_folder(tmp_path, "chaos-on-hosts")))
    links = [attributes.get(name) for _, attributes in found.tags for name in ("src", "href", "action", "xlink:href")]
    assert {link for link in links if link} == {"data:,"}
    policies = [each["content"] for tag, each in found.tags if tag == "meta" and "http-equiv" in each]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert ("html", {"lang": "en"}) in found.tags


def test_secrets_are_hidden(tmp_path):
    """Also if a journal should have them."""
    entries = failed_run(tail="the key is hunter2-hunter2 and ana:secret-word", exit_code=1)
    folder = write_journal(tmp_path, entries, env={"API_TOKEN": "hunter2-hunter2"})
    text = html(folder, done(1, "postgres://ana:hunter3@db"), {"WANDB_API_KEY": "secret-word"})
    assert not re.search("hunter|secret-word", text)
    assert "the key is *** and ana:***" in text


@pytest.mark.parametrize(
    "name", ["drained-and-gone-early", "interrupted-twice", "silent-nodes-given-up", "two-kills-then-finished"]
)
def test_journals_that_are_cut(tmp_path, name):
    """After each line there is a page, also before anything has happened."""
    folder = replay_folder(tmp_path, name)
    lines = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)
    for number in range(1, len(lines) + 1):
        (folder / "events.jsonl").write_bytes(b"".join(lines[:number])[:-1])
        assert "outcome" in Page(html(folder)).sections


@pytest.mark.parametrize(("entries", "more"), [(restarted_often(1000), "and 951 more"), (many_nodes(300), "270 nodes")])
def test_long_and_wide_runs_stay_readable(tmp_path, entries, more):
    """What would be too much is counted."""
    text = html(write_journal(tmp_path, entries, nnodes="1:300"))
    assert len(text) < MOST_BYTES / 4
    assert more in Page(text).text


def test_in_a_browser(tmp_path):
    """Chromium has nothing to say about it, and shows it at a width of 400 pixels without scrolling sideways."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    text = html(replay_folder(tmp_path / "run", "chaos-on-hosts"))
    path = tmp_path / "probe.html"
    path.write_text(_PROBE % json.dumps(text).replace("<", "\\u003c"))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    flags = [f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    seen = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in seen.stderr
    assert "<title>it fits</title>" in seen.stdout
