"""From a job file and `key=value` overrides to a `Job`, or to an error that points at every mistake."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from raylaunch.cli.marks import Finding, Place, render
from raylaunch.cli.references import broken_reference
from raylaunch.cli.settings import MisfitError, advice, fitted, inner, near_miss, shown
from raylaunch.cli.written import Dumper, Given, NotYamlError, parse
from raylaunch.core.job import Entrypoint, Job, problems
from raylaunch.errors import ConfigError

_MISSING = "???"
_COMMAND_WIDTH = 100


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Job:
    """The job of a file with overrides merged in; raises ConfigError with everything that is wrong."""
    title = os.fspath(path)
    text = _read(title)
    findings: list[Finding] = []
    whole = Place(source=title)
    root = Given(key=whole, place=whole, children={})
    readable = True
    try:
        root = _settings(parse(text, _Lines(title, text), whole, findings), root, findings)
    except NotYamlError as error:
        findings.append(error.finding)
        readable = False
    for override, place in zip(overrides, _command_line(title, overrides), strict=True):
        _override(root, override, place, findings)
    job = _Check(root, findings).job()
    if readable:
        findings += _problems(job, root, findings)
    if findings:
        raise ConfigError(render(findings))
    return job


def dump(job: Job) -> str:
    """The whole job as YAML that `load` reads back."""
    return yaml.dump(_escaped(asdict(job)), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=10_000)
