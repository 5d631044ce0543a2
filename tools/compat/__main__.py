"""`python -m tools.compat`: try combinations of versions one after another, and print the table.

--only "py3.12 ray2.52 torch2.15" tries the usual combinations that have these versions, or makes one of them;
commas part several, and `cheap` stands for two that CI tries. Versions may be `newest`. `today` is what pip would
install today, with which more tests are run; `cuda` a torch with CUDA, of which one sees which processes touch it. `--smoke` tries nothing new: it runs some tests with this Python, to see
that this program works.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timezone

from tools.bench.tables import aligned
from tools.compat import checks, combinations, results
from tools.compat.checks import SMOKE, SUITES, Column
from tools.compat.combinations import Combination
from tools.compat.environments import FOLDER, HERE, Environment, InstallError, UnavailableError, environment


def main() -> int:
    """Exit code 1 where anything failed or could not be installed, or where a combination could not be tried.

    With `--if-available`, the last is none: without a package index, or without that Python.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tools.compat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORDS", help="see above")
    parser.add_argument("--smoke", action="store_true", help="see above")
    parser.add_argument("--keep", action="store_true", help=f"do not remove the environments, which are in {FOLDER}")
    parser.add_argument("--if-available", action="store_true", help="what this machine cannot try is no failure")
    args = parser.parse_args()
    try:
        asked = combinations.chosen(args.only)
    except ValueError as error:
        parser.error(str(error))
    FOLDER.mkdir(exist_ok=True)
    if args.smoke:
        outcomes: list[results.Row | Exception] = [_row("this Python", HERE, SMOKE)]
    else:
        outcomes = [_tried(each, keep=args.keep) for each in asked]
    if rows := [row for row in outcomes if isinstance(row, dict)]:
        print("\n".join(("", *aligned(list(results.table(rows))), "", *results.notes(rows))))
    return 0 if all(_is_well(each, if_available=args.if_available) for each in outcomes) else 1


def _is_well(outcome: results.Row | Exception, *, if_available: bool) -> bool:
    if isinstance(outcome, dict):
        return not results.failures(outcome)
    return if_available and isinstance(outcome, UnavailableError)


def _tried(combination: Combination, *, keep: bool) -> results.Row | UnavailableError | InstallError:
    """Try a combination, and write what came of it; return why not if it cannot be tried."""
    began = time.monotonic()
    print(f"{combination} ...", end=" ", flush=True)
    try:
        with environment(combination, keep=keep) as found:
            print(f"installed after {time.monotonic() - began:.0f} s ...", end=" ", flush=True)
            row = _row(str(combination), found, SUITES[combination.suite])
    except (UnavailableError, InstallError) as error:
        print(f"{'left out' if isinstance(error, UnavailableError) else 'not installed'}: {error}", flush=True)
        return error
    if not combination.suite:
        results.add(row)
    return row


def _row(asked: str, found: Environment, columns: Mapping[str, Column]) -> results.Row:
    """Run the tests of some columns in an environment."""
    began = time.monotonic()
    log = FOLDER / f"{asked.replace(' ', '-')}.log"
    log.unlink(missing_ok=True)
    row = {
        "asked": asked,
        "date": datetime.now(timezone.utc).date().isoformat(),
        **found.versions(),
        "found": {name: each.record() for name, each in checks.run(found, columns, log=log).items()},
    }
    failed = results.failures(row)
    print(
        f"{f'{len(failed)} tests failed, see {log}' if failed else 'ok'}, {time.monotonic() - began:.0f} s", flush=True
    )
    return row


if __name__ == "__main__":
    sys.exit(main())
