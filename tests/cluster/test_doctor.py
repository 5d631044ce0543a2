"""`raylaunch doctor` on a cluster."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_a_cluster_with_a_job(launcher):
    """Its nodes are asked, and its plan is made; a job that can never start is an error."""
    launcher.script("print('never')")
    job = {"entrypoint": {"script": "train.py"}, "nnodes": 1, "nproc_per_node": 2, "env": {"A": "b"}}
    (launcher.folder / "job.yaml").write_text(json.dumps(job))
    (launcher.folder / "large.yaml").write_text(json.dumps(job | {"nproc_per_node": 64}))
    done = launcher.python("raylaunch", "doctor", "--json", "job.yaml")
    findings = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert [each for each in findings.values() if each["severity"] == "error"] == []
    assert done.returncode == 0
    assert "has 1 node" in findings["cluster"]["text"]
    assert findings["token"]["severity"] == "ok"
    assert findings["script"]["text"] == "`train.py` is on all nodes"
    assert findings["room"]["text"] == "would start 2 workers on 1 node"
    done = launcher.python("raylaunch", "doctor", "large.yaml")
    assert done.returncode == 1
    assert "error    room: room for 0 of 1 nodes" in done.stdout
    assert "fix: it could start now with `cpus_per_worker=0` or `nproc_per_node=4`" in done.stdout
