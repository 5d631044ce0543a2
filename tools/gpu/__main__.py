"""`make gpu`: run all that needs a GPU on this machine, without a network, and write gpu.json and a table.

Exit code 0: all passed; 1: something failed; 3: this machine has no GPU, or lacks something else, which is said.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tools.gpu import environment, results, steps
from tools.gpu.results import StepResult

SECONDS = 520.0
"""For everything: commands on borrowed machines end after ten minutes."""
NOT_HERE = 3
_RECORD, _TABLE, _LOGS = "gpu.json", "gpu.md", "gpu-logs.tar.gz"
_MOST_BYTES = 2**20
"""Of a file in the logs."""


def main(words: list[str] | None = None) -> int:
    """Look for what is missing, then run the steps."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path(), help="where gpu.json, gpu.md and gpu-logs.tar.gz are written"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything [%(default)s]")
    parser.add_argument("--only", default="", help=f"of {', '.join(step.name for step in steps.STEPS)}")
    parser.add_argument(
        "--at-once", type=int, default=4 if (os.cpu_count() or 1) > 7 else 1, help="steps [%(default)s]"
    )
    parser.add_argument("--simulate", action="store_true", help="without a GPU, to test this program itself")
    parser.add_argument("--smoke", action="store_true", help="a few tests, to see that this program works")
    parser.add_argument("--markdown", action="store_true", help=f"print the table of {_RECORD} and run nothing")
    options = parser.parse_args(words)
    if options.markdown:
        print(results.table(json.loads((options.out / _RECORD).read_text())))
        return 0
    if unknown := set(options.only.split()) - {step.name for step in steps.STEPS}:
        parser.error(f"no such step: {', '.join(sorted(unknown))}")
    deadline = time.monotonic() + options.seconds
    scratch = Path(tempfile.mkdtemp(prefix="rlgpu-", dir="/tmp"))  # short: sockets are below it
    try:
        return _run(options, scratch, deadline)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(options: argparse.Namespace, scratch: Path, deadline: float) -> int:
    try:
        python = environment.prepare(scratch / "python")
    except environment.CannotPrepareError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return NOT_HERE
    facts = environment.facts(python)
    if lacks := missing(facts, simulated=options.simulate):
        print("\n".join(f"make gpu: {line}" for line in lacks), file=sys.stderr)
        return NOT_HERE
    versions = {name: facts.get(name) for name in ("python", "torch", "cuda", "nccl")}
    head = {
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "simulated": options.simulate,
        "machine": environment.machine() | versions,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    found: list[StepResult] = []

    def done(result: StepResult) -> None:
        found.append(result)
        results.write(options.out / _RECORD, head, found)
        print(f"{result.name}: {result.outcome}, {result.seconds:.0f} s", flush=True)
        for test in result.tests:
            print(f"  {test.outcome:8} {test.seconds:6.1f} s  {test.test} {test.figures or ''}", flush=True)

    among = steps.SMOKE if options.smoke else steps.STEPS
    wanted = [step for step in among if not options.only or step.name in options.only.split()]
    runner = steps.Runner(
        python=python, scratch=scratch, deadline=deadline, env=_env(options, scratch, facts), at_once=options.at_once
    )
    runner.run(wanted, done)
    text = results.table(json.loads((options.out / _RECORD).read_text()))
    (options.out / _TABLE).write_text(text + "\n")
    _pack_logs(scratch, [result.name for result in found if result.output], options.out / _LOGS)
    print(f"\n{text}\n\neverything is in {options.out / _RECORD}")
    return 0 if {result.outcome for result in found} <= {results.PASSED, results.SKIPPED} else 1


def _pack_logs(scratch: Path, names: list[str], target: Path) -> None:
    """Write what is left of the steps that did not pass, without large files: the time of a GPU is short."""
    target.unlink(missing_ok=True)
    if not names:
        return
    with tarfile.open(target, "w:gz") as packed:
        for name in names:
            for path in [scratch / f"{name}.log", *(scratch / name).rglob("*")]:
                if path.is_file() and not path.is_symlink() and path.stat().st_size < _MOST_BYTES:
                    packed.add(path, path.relative_to(scratch))


def missing(facts: dict[str, Any], *, simulated: bool) -> list[str]:
    """Return in sentences what this machine lacks."""
    found = []
    if "error" in facts:
        found.append(f"Python cannot import torch: {facts['error']}")
    if facts["missing"]:
        found.append(f"these packages are missing: {', '.join(facts['missing'])}")
    if not simulated and not facts["gpus"] and "torch" in facts:
        found.append(f"there is no CUDA GPU: torch {facts['torch']} sees none, and nvidia-smi {_smi()}")
    return found


def _smi() -> str:
    return f"shows {said}" if (said := environment.driver()) else "is missing or sees none"


def _env(options: argparse.Namespace, scratch: Path, facts: dict[str, Any]) -> dict[str, str]:
    """Return the environment of the steps: without what a Ray or a launcher around this one has set."""
    others = ("RAY_", "PET_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "PYTEST_", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    for name in ("tmp", "state"):
        (scratch / name).mkdir()
    env |= {"TMPDIR": str(scratch / "tmp"), "XDG_STATE_HOME": str(scratch / "state"), "PYTHONUNBUFFERED": "1"}
    env[steps.GPUS] = str(len(facts["gpus"]))
    if options.simulate:
        device = scratch / "nvidia-uvm"
        device.touch()
        env |= {steps.SIMULATED: str(device), steps.GPUS: "1"}
    return env


if __name__ == "__main__":
    sys.exit(main())
