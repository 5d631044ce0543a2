"""What Ray keeps of the command line."""

from __future__ import annotations

import os
import sys

from raylaunch.cluster.session import ray_session
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.job.redaction import Redactor

SECRETS = Redactor(values=("hf_abc efgh",))


def test_the_command_line_has_no_secrets(monkeypatch):
    """Neither those after the names of arguments nor other values; what is not UTF-8 is escaped."""
    line = ["python", "-m", "raylaunch", "a b.py", "--api-key=k1", "--password", "p1", "x=hf_abc efgh", "caf\udce9"]
    monkeypatch.setattr(sys, "orig_argv", line)
    kept = ray_session.job_entrypoint(SECRETS)
    assert kept == r'python -m raylaunch "a b.py" --api-key=*** --password *** x=*** caf\xe9'


def test_facts_of_a_run(monkeypatch):
    """For the list of jobs: text, without secrets, and without what is not known."""
    monkeypatch.setattr("raylaunch.cluster.session.ray_session.user_name", lambda: "ada")
    monkeypatch.setattr("socket.gethostname", lambda: "vm")
    job = Job(entrypoint=Entrypoint(script="train.py"), name="charlm-hf_abc efgh", nnodes="1:4", nproc_per_node=8)
    found = ray_session.job_metadata(job, SECRETS)
    assert found.pop("raylaunch_version")
    assert found.pop("driver") == f"process {os.getpid()} on vm"
    assert found == {"run_name": "charlm-***", "nnodes": "1:4", "nproc_per_node": "8", "user": "ada"}
