"""`raylaunch.launch`: functions on every worker, results by rank, exceptions as exceptions."""

from __future__ import annotations

import json
import textwrap

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def python(launcher, text: str, *, preload: tuple[str, ...] = ()) -> dict:
    """Run a program that uses raylaunch; return the JSON that it prints. `preload`: what its jobs preload."""
    path = launcher.folder / "program.py"
    path.write_text(
        "import json, raylaunch\nWHERE = dict(nnodes=2, nproc_per_node=2, placement='pack')\n" + textwrap.dedent(text)
    )
    done = launcher.python(str(path), env=launcher.torch_env(preload))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_results_by_rank(launcher):
    """Arguments and results are pickled, also of a closure of `__main__`; the process group exists; stdout is free."""
    found = python(
        launcher,
        """
        offset = 10
        def work(x, *, scale):
            import torch, torch.distributed as dist
            total = torch.tensor([float(x)])
            dist.all_reduce(total)
            return dist.get_rank() * scale + offset, total.item(), dist.get_backend()
        one = dict(nproc_per_node=4, show="none", preload=["torch"])
        print(json.dumps(raylaunch.launch(work, (3,), {"scale": 2}, **one)))
        """,
        preload=("torch",),
    )
    assert found == [[10, 12.0, "gloo"], [12, 12.0, "gloo"], [14, 12.0, "gloo"], [16, 12.0, "gloo"]]


def test_exception_of_a_rank(launcher):
    """A rank's exception is the cause of the raised one, whose text has the rank's traceback; a restart may succeed."""
    found = python(
        launcher,
        """
        import os
        ONE = dict(nproc_per_node=4, backend="none", preload=[])
        def work(mends):
            if os.environ["RANK"] == "2" and not (mends and os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"):
                raise KeyError("no such shard")
            return int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        try:
            raylaunch.launch(work, (False,), **ONE)
        except raylaunch.JobFailedError as error:
            told = [type(error.__cause__).__name__, str(error.__cause__), str(error)]
        print(json.dumps([told, raylaunch.launch(work, (True,), max_restarts=1, **ONE)]))
        """,
    )
    (kind, text, report), results = found
    assert (kind, text) == ("KeyError", "'no such shard'")
    assert "rank 2 raised KeyError" in report
    assert 'raise KeyError("no such shard")' in report
    assert results == [1, 1, 1, 1]


def test_wrong_settings(launcher):
    """An unknown setting, a wrong type or a wrong value: ConfigError, and nothing is started."""
    found = python(
        launcher,
        """
        told = []
        for settings in ({"nods": 2}, {"nnodes": "4:2"}, {"max_restarts": "many"}):
            try:
                raylaunch.launch(print, **settings)
            except raylaunch.ConfigError as error:
                told.append(str(error))
        print(json.dumps(told))
        """,
    )
    assert "`nods`" in found[0]
    assert "nodes" in found[0]
    assert "the minimum (4) is larger than the maximum (2)" in found[1]
    assert "max_restarts" in found[2]
