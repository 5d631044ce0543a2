"""`python -m tools.examples [NAMES]`: run examples under both launchers, kill a rank, and compare. Exit code 1: one failed."""

from __future__ import annotations

import argparse
import math
import signal
import sys

from tools.examples import runs
from tools.examples.example import Example, chosen


def compare(example: Example) -> str:
    """Run an example three times, and return a line about it. Raises RunError where it does not keep its promise."""
    if not example.kill_at:
        return f"{example.name}: killed and compared by itself in {runs.executed(example):.1f} s"
    whole = runs.undisturbed(example)
    ours = runs.killed_under_raylaunch(example)
    theirs = runs.killed_under_torchrun(example)
    for launcher, ended in (("raylaunch", ours), ("torchrun", theirs)):
        is_same = ended.loss == whole.loss
        if not (is_same or math.isclose(float(ended.loss), float(whole.loss), rel_tol=example.tolerance)):
            msg = f"{example.name} ended under {launcher} with loss {ended.loss}, and undisturbed with {whole.loss}"
            raise runs.RunError(msg)
    promise = "bitwise the same loss" if ours.loss == whole.loss == theirs.loss else f"within {example.tolerance:g}"
    return (
        f"{example.name}: {promise}, {whole.loss}; undisturbed {whole.seconds:.1f} s; killed under raylaunch "
        f"{ours.seconds:.1f} s, went on after step {ours.resumed[0]}; under torchrun {theirs.seconds:.1f} s, after step "
        f"{theirs.resumed[0]}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.examples", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="the names of scripts, without .py; none: all")
    try:
        examples = chosen(parser.parse_args().names)
    except ValueError as error:
        parser.error(str(error))
    failed = 0
    for example in examples:
        if example.lacks:
            print(f"{example.name}: skipped, since {', '.join(example.lacks)} is not installed", flush=True)
            continue
        try:
            print(compare(example), flush=True)
        except runs.RunError as error:
            failed += 1
            print(f"FAILED: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended, too
    sys.exit(main())
