"""The schema of a job as OmegaConf holds it, which checks every value that is put into it."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import OmegaConf

from raylaunch.cli import explain
from raylaunch.core.job import Job, NodeRule


def defaults() -> Any:
    """A job that says nothing."""
    config = OmegaConf.structured(Job)
    for section in (config, config.entrypoint, config.ray):
        OmegaConf.set_readonly(section, False)  # which it is since the dataclasses are frozen
    return config


def open_rule(config: Any, key: str) -> None:
    """A rule for a node has to be there before anything in it can be set."""
    OmegaConf.update(config, key, NodeRule(), merge=False)
    OmegaConf.set_readonly(OmegaConf.select(config, key), False)


def key_of(path: explain.Path) -> str:
    """A path as OmegaConf spells it."""
    return ".".join(re.sub(r"([].=[])", r"\\\1", name) for name in path)
