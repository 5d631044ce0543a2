"""`python -m tests.compat`: try combinations of versions one after another, and print the table.

--only "py3.12 ray2.52 torch2.15" tries those of the usual combinations that have these versions, or makes one of them;
commas part several, and `cheap` stands for two that need no torch with CUDA. Versions may be `newest`, torch's `none`.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import datetime, timezone

from tests.bench.tables import aligned
from tests.compat import checks, combinations, results
from tests.compat.combinations import NONE, Combination
from tests.compat.environments import FOLDER, UnavailableError, environment


def main() -> int:
    """Exit code 1 where anything failed, or a combination could not be tried."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.compat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORDS", help="see above")
    parser.add_argument("--keep", action="store_true", help=f"do not remove the environments, which are in {FOLDER}")
    args = parser.parse_args()
    try:
        asked = combinations.chosen(args.only)
    except ValueError as error:
        parser.error(str(error))
    FOLDER.mkdir(exist_ok=True)
    rows = [row for each in asked if (row := _row(each, keep=args.keep))]
    if rows:
        print("\n".join(("", *aligned(list(results.table(rows))), "", *results.notes(rows))))
    return 0 if len(rows) == len(asked) and not any(results.failures(row) for row in rows) else 1


def _row(combination: Combination, *, keep: bool) -> results.Row | None:
    """Try a combination, and write what came of it; None if it cannot be tried here."""
    began = time.monotonic()
    log = FOLDER / f"{str(combination).replace(' ', '-')}.log"
    log.unlink(missing_ok=True)
    print(f"{combination} ...", end=" ", flush=True)
    try:
        with environment(combination, keep=keep) as found:
            print(f"installed after {time.monotonic() - began:.0f} s ...", end=" ", flush=True)
            row = {
                "asked": str(combination),
                "date": datetime.now(timezone.utc).date().isoformat(),
                **found.versions(),
                "found": {
                    name: each.record()
                    for name, each in checks.run(found, has_torch=combination.torch != NONE, log=log).items()
                },
            }
    except UnavailableError as error:
        print(f"left out: {error}", flush=True)
        return None
    results.add(row)
    failed = results.failures(row)
    print(
        f"{f'{len(failed)} tests failed, see {log}' if failed else 'ok'}, {time.monotonic() - began:.0f} s", flush=True
    )
    return row


if __name__ == "__main__":
    sys.exit(main())
