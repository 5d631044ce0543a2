"""Make a `Job` from settings that Python code gives, for `raylaunch.launch`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import yaml
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from raylaunch.cli.config import schema, type_errors
from raylaunch.cli.config.job_file import escaped
from raylaunch.core.job import secrets
from raylaunch.core.job.job import Entrypoint, Job, NodeRule, RayOptions
from raylaunch.core.job.validation import problems
from raylaunch.errors import ConfigError

_NULL, _STR, _MAP, _SEQ = (f"tag:yaml.org,2002:{kind}" for kind in ("null", "str", "map", "seq"))


def job_of(settings: Mapping[str, Any]) -> Job:
    """Return the job of settings given in Python, where a section is a dataclass or a dict. Raises ConfigError."""
    config = schema.defaults()
    for path, value in _leaves((), settings):
        try:
            _update(config, path, value)
        except (ConfigAttributeError, ConfigKeyError):
            message, hint = type_errors.unknown_setting(path)
            raise ConfigError(message, hint=hint) from None
        except OmegaConfBaseException as error:
            message, hint = type_errors.wrong_value(
                error, path, schema.type_of(path, schema.SETTINGS), _as_node(path, value)
            )
            raise ConfigError(f"`{'.'.join(path)}`: {message}", hint=hint) from None
    job = schema.to_job(config)
    found = problems(job)
    if found:
        raise ConfigError("; ".join(f"`{problem.key}`: {problem.message}" for problem in found), hint=found[0].hint)
    return job


def _leaves(path: schema.Path, value: Any) -> Iterator[tuple[schema.Path, Any]]:
    """Yield the path and value of each setting in a section. A node rule is yielded before its settings."""
    hint = schema.type_of(path, schema.SETTINGS)
    inside = asdict(value) if isinstance(value, Entrypoint | NodeRule | RayOptions) else value
    if isinstance(inside, Mapping) and schema.container(path) is dict:
        if hint is NodeRule:
            yield path, NodeRule()
        for name, item in inside.items():
            yield from _leaves((*path, str(name)), item)
    else:
        yield path, inside


def _as_node(path: schema.Path, value: Any) -> yaml.Node:
    """Return a value from Python as a YAML node, for an error message."""
    if isinstance(value, Mapping):
        return yaml.MappingNode(_MAP, [])
    if isinstance(value, list | tuple) and schema.container(path) is not list:
        return yaml.SequenceNode(_SEQ, [])
    if value is None:
        return yaml.ScalarNode(_NULL, "")
    return yaml.ScalarNode(_STR, secrets.HIDDEN if secrets.is_secret(path[-1]) else str(value))


def _update(config: Any, path: schema.Path, value: Any) -> None:
    """Set a value from Python, where text is literal: `${x}` in it is not a reference."""
    if isinstance(value, NodeRule):
        schema.add_rule(config, path)
    else:
        if not isinstance(value, list | tuple):
            schema.check_union(schema.type_of(path, schema.SETTINGS), value)
        schema.put(config, path, escaped(value))
