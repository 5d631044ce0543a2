"""Which scripts the fork server takes for such as need torch's compiler."""

from __future__ import annotations

import os

import pytest

from raylaunch.node.preload.initial import may_need_compiler

COMMUNICATES = """
import json, os
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from raylaunch.worker import context

dist.init_process_group("gloo")
dist.all_reduce(torch.nn.Linear(3, 3)(torch.ones(3)))
"""


def test_a_script_that_only_communicates_does_not(tmp_path):
    script = tmp_path / "t.py"
    script.write_text(COMMUNICATES)
    assert not may_need_compiler(str(script))


@pytest.mark.parametrize(
    "line",
    [
        "torch.optim.SGD([])",
        "from torch.optim import SGD",
        "from torch import optim",
        "import torch.optim as o",
        "from torch import *",
        "torch.nn.parallel.DistributedDataParallel(model)",
        "@torch.compile\ndef f(): pass",
        "torch.func.grad(f)",
        "import transformers",
        "import numpy, pandas.io",
        "from model import Net",
        "from . import model",
        "from .torch import model",
        "__import__('model')",
        "exec(text)",
        "import importlib\nimportlib.import_module('model')",
        "def f(:",
        "x = '\0'",
        "x = " + "(" * 10_000,
        "#" * 1_000_000,
    ],
)
def test_others_may(tmp_path, line):
    script = tmp_path / "t.py"
    script.write_text(f"{COMMUNICATES}\n{line}\n")
    assert may_need_compiler(str(script))


def test_what_cannot_be_read_may(tmp_path):
    """A folder or an archive with a `__main__.py`, a pipe, which is left unread, and a file in the wrong encoding."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin.py").write_bytes(b"name = '\xe9'\n")
    for name in ("", "pipe", "latin.py", "absent.py", "\0"):
        assert may_need_compiler(str(tmp_path / name)), name
