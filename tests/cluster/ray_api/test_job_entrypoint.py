"""What Ray keeps of the command line."""

from __future__ import annotations

import sys

from ray._private import utils

from raylaunch.cluster.ray_api import job_entrypoint
from raylaunch.core.job.redaction import Redactor

SECRETS = Redactor(values=("hf_abc efgh",))


def test_the_command_line_has_no_secrets(monkeypatch):
    """Neither those after the names of arguments nor other values; what is not UTF-8 is escaped."""
    line = ["python", "-m", "raylaunch", "a b.py", "--api-key=k1", "--password", "p1", "x=hf_abc efgh", "caf\udce9"]
    monkeypatch.setattr(sys, "orig_argv", line)
    with job_entrypoint.redacted(SECRETS):
        kept = utils.get_entrypoint_name()
    assert kept == r'python -m raylaunch "a b.py" --api-key=*** --password *** x=*** caf\xe9'


def test_the_function_is_there_and_is_put_back():
    """Ray's own code calls it by this name."""
    before = utils.get_entrypoint_name
    with job_entrypoint.redacted(SECRETS):
        assert utils.get_entrypoint_name is not before
    assert utils.get_entrypoint_name is before
