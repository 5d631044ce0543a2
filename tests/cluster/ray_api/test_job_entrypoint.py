"""What Ray keeps of the command line."""

from __future__ import annotations

import sys

from raylaunch.cluster.ray_api import job_entrypoint
from raylaunch.core.job.redaction import Redactor

SECRETS = Redactor(values=("hf_abc efgh",))


def test_the_command_line_has_no_secrets(monkeypatch):
    """Neither those after the names of arguments nor other values; what is not UTF-8 is escaped."""
    line = ["python", "-m", "raylaunch", "a b.py", "--api-key=k1", "--password", "p1", "x=hf_abc efgh", "caf\udce9"]
    monkeypatch.setattr(sys, "orig_argv", line)
    kept = job_entrypoint.text(SECRETS)
    assert kept == r'python -m raylaunch "a b.py" --api-key=*** --password *** x=*** caf\xe9'
