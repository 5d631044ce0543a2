"""`make smoke`: run each tool with the smallest sizes, to see that it runs and prints its table.

Several run at a time, so that nothing measured here means anything. A tool that takes too long, or ends with an error, is
shown with the beginning and the end of what it printed. Exit code 1 where any did.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tools.bench.__main__ import BENCHES
from tools.bench.tables import aligned

ROOT = Path(__file__).parents[1]
SECONDS = 900.0
_AT_ONCE = 3
_END_SECONDS = 60.0
_MOST_LINES = 60


@dataclass(frozen=True, slots=True)
class Command:
    """One tool with its arguments. `name`: what `--only` takes."""

    name: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a command. `code`: None, if it took too long."""

    command: Command
    code: int | None
    seconds: float
    output: str


def commands(folder: Path) -> Iterator[Command]:
    """Yield all of them, those that take longest first. What they write goes to the folder."""
    on_cluster = [name for name, bench in BENCHES.items() if bench.needs_cluster]
    alone = [name for name, bench in BENCHES.items() if not bench.needs_cluster]
    for number, names in enumerate((on_cluster[::2], on_cluster[1::2], alone), 1):
        yield Command(f"bench-{number}", ("tools.bench", "--smoke", *names))
    yield Command("chaos", ("tools.chaos", "--smoke"))
    yield Command("gpu", ("tools.gpu", "--simulate", "--smoke", "--out", str(folder)))
    yield Command("compat", ("tools.compat", "--smoke"))
    yield Command("profile-restart", ("tools.bench.profile_restart", "1"))
    yield Command("fuzz", ("tools.fuzz", "--smoke"))


def run(command: Command) -> Outcome:
    """Run a tool in a session of its own. It ends what it has started when it gets SIGINT."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", *command.words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, code = process.communicate(timeout=SECONDS)[0], process.returncode
    except subprocess.TimeoutExpired:
        output, code = _ended(process), None
    return Outcome(command, code, time.monotonic() - began, output)


def _ended(process: subprocess.Popen[str]) -> str:
    for number in (signal.SIGINT, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=_END_SECONDS)[0]
        except subprocess.TimeoutExpired:
            continue
    return process.communicate()[0]


def main() -> int:
    """Run them all, or those that are named."""
    parser = argparse.ArgumentParser(prog="python -m tools.smoke", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of the table; all without one")
    names = parser.parse_args().names
    began = time.monotonic()
    rows = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(_AT_ONCE) as pool:
        wanted = [each for each in commands(Path(folder)) if not names or each.name in names]
        for future in as_completed([pool.submit(run, each) for each in wanted]):
            found = future.result()
            said = {0: "ok", None: "took too long"}.get(found.code, f"exit code {found.code}")
            rows.append((found.command.name, said, f"{found.seconds:.0f}"))
            print(f"{found.command.name}: {said}, {found.seconds:.0f} s", flush=True)
            if found.code != 0:
                lines = found.output.splitlines()
                cut = ["..."] if len(lines) > 2 * _MOST_LINES else []
                print("\n".join([*lines[:-_MOST_LINES][:_MOST_LINES], *cut, *lines[-_MOST_LINES:]]), flush=True)
    print("\n".join(("", *aligned([("tool", "outcome", "s"), *rows]))))
    failed = sum(row[1] != "ok" for row in rows)
    print(f"\n{len(rows) - failed} of {len(rows)} tools run, in {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
