"""`make fuzz`: draw new cases for all properties until the time is over or one of them fails.

A property is a test that uses hypothesis. Each is run in a pytest of its own, with a seed of its own, one per CPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.profiles import FIXED, FUZZ

ROOT = Path(__file__).parent.parent
PYTEST = (os.path.relpath(sys.executable, ROOT), "-m", "pytest", "--timeout=1800")
SMOKE_PATHS = ("tests/core/placement",)
_NO_TESTS = 5
"""pytest's exit code where it found no test."""


def properties(paths: Sequence[str]) -> list[str]:
    """Return the test ids of all properties below these paths."""
    command = [*PYTEST, "--collect-only", "-q", "-m", "hypothesis", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, _NO_TESTS):
        sys.exit(done.stdout + done.stderr)
    return [line for line in done.stdout.splitlines() if "::" in line]


def repeat(test: str, seed: int, profile: str = FUZZ) -> list[str]:
    """Return the command that draws the same cases again."""
    return [*PYTEST, f"--hypothesis-profile={profile}", f"--hypothesis-seed={seed}", "-q", test]


class Fuzz:
    """Runs of properties, in several threads."""

    def __init__(self, tests: list[str], seed: int, seconds: float, profile: str) -> None:
        shuffled = random.Random(seed).sample(tests, len(tests))
        self._runs = zip(itertools.cycle(shuffled), itertools.count(seed), strict=False)
        self._profile = profile
        self._end = time.monotonic() + seconds
        self._lock = threading.Lock()
        self.done = 0
        self.failures: list[tuple[list[str], str]] = []
        """Commands that failed, and what they printed."""

    def run(self) -> None:
        """Run one property after the other; called by each thread."""
        while time.monotonic() < self._end and not self.failures:
            with self._lock:
                command = repeat(*next(self._runs), self._profile)
            found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            with self._lock:
                self.done += 1
                if found.returncode:
                    self.failures.append((command, found.stdout + found.stderr))


def main() -> int:
    """Return the exit code: 1 where a property failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to draw (default: 600)")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(10**9), help="default: a random one"
    )
    parser.add_argument("--smoke", action="store_true", help="draw few cases, for a second, to see that this works")
    parser.add_argument("paths", nargs="*", default=["tests"], help="where the properties are (default: tests)")
    args = parser.parse_args()
    profile = FUZZ
    if args.smoke:
        args.paths, args.seconds, profile = SMOKE_PATHS, 1.0, FIXED
    tests = properties(args.paths)
    if not tests:
        parser.error("no properties there")
    print(f"{len(tests)} properties for {args.seconds:g} s, seed {args.seed}", flush=True)
    fuzz = Fuzz(tests, args.seed, args.seconds, profile)
    threads = [threading.Thread(target=fuzz.run) for _ in range(os.cpu_count() or 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for command, output in fuzz.failures:
        print(f"{output}\nTo repeat it:\n  {shlex.join(command)}")
    print(f"seed {args.seed}: {fuzz.done} runs of properties, {len(fuzz.failures)} failed")
    return bool(fuzz.failures)


if __name__ == "__main__":
    sys.exit(main())
