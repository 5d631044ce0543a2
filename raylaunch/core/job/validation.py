"""Validation: the problems of a job whose values have the right types."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from raylaunch.core.job import node_rules, outputs
from raylaunch.core.job.job import (
    AUTO_PRELOAD,
    ENTRYPOINT_KINDS,
    EVENT_LOG_HANDLERS,
    HANG_WORDS,
    LOG_LAYOUTS,
    NPROC_WORDS,
    NUMA_BINDINGS,
    PLACEMENTS,
    PROGRESS_KINDS,
    Entrypoint,
    Job,
    NodeRule,
    StartMethod,
    is_number,
    node_range,
    shown_ranks,
)
from raylaunch.core.job.secrets import HIDDEN, is_secret
from raylaunch.core.text import count, spans

AUTO_DEADLINE = "auto"
DEADLINE_EXAMPLE = "for example `3h50m`, `18:30`, `2026-01-31T18:30:00+01:00`, or `auto` for the end of a Slurm job"

_NUMBER = r"[0-9]{1,9}(\.[0-9]{1,9})?"
_DEADLINE = re.compile(
    rf"(?=.)({_NUMBER}d)?({_NUMBER}h)?({_NUMBER}m)?({_NUMBER}s?)?"
    r"|[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?"
    r"|[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?([zZ]|[-+][0-9]{2}:[0-9]{2})?)?"
)
"""The forms of `deadline`. Whether it is a time that is to come is found out when the run begins."""
_MAX_PORT = 65535
_MAX_NAME_BYTES = 200
"""Linux allows 255 bytes in the name of a folder; the run folder's may get a number at its end."""
_DAY = 86_400
_YEAR = 365 * _DAY
_MAX_NODES = 100_000
_MAX_WORKERS = 1_000_000
_MAX_COUNT = 1_000_000_000
_MAX_GIB = 1_000_000


@dataclass(frozen=True, slots=True)
class _NumberRange:
    """The numbers that a setting takes."""

    least: float
    most: float
    is_time: bool = False
    """Whether the number is in seconds."""
    above: bool = False
    """Whether it must be greater than the least one."""
    endless: bool = False
    """Whether infinity is also allowed."""
    hint: str = ""
    """What to do if the number is not in the range."""


_WORKERS = _NumberRange(1, _MAX_WORKERS, hint="at least one worker is needed")
_WAIT = _NumberRange(0, _YEAR, is_time=True, above=True, endless=True)
_TIME = _NumberRange(0, _YEAR, is_time=True)

# Timers of Linux and Python refuse times that are much longer than a year.
_RANGES = {
    "nprocs": _WORKERS,
    "placement_timeout": _WAIT,
    "join_timeout": _WAIT,
    "start_timeout": _NumberRange(0, _YEAR, is_time=True, above=True),
    "hang_timeout": _NumberRange(0, _YEAR, is_time=True, above=True, hint="`off` stands for never"),
    "grace": _TIME,
    "last_call": _TIME,
    "shutdown_timeout": _TIME,
    "state_memory": _NumberRange(0, _MAX_GIB, above=True),
    "durable_every": _TIME,
    "durable_keep": _NumberRange(1, _MAX_COUNT),
    "keep_warm": _TIME,
    "driver_timeout": _TIME,
    # A busy host may be silent for almost a second.
    "node_timeout": _NumberRange(1, _DAY, is_time=True),
    "max_restarts": _NumberRange(0, _MAX_COUNT),
    "debug": _NumberRange(0, _MAX_COUNT),
    "exclude_after": _NumberRange(0, _MAX_COUNT),
    "spares": _NumberRange(0, _MAX_NODES),
    "cpus_per_worker": _NumberRange(0, _MAX_WORKERS),
    "multiple_of": _NumberRange(1, _MAX_WORKERS, hint="1 allows every world size"),
}
"""By the key of a job. Some of these settings may also be text, which is not looked at here."""

NOTICES = ("off", "aws", "gcp", "azure")
"""What `preemption_notices` may be."""
_NODES = _NumberRange(1, _MAX_NODES)
"""The range of each number in `nnodes`."""
_RULE_WORKERS = _NumberRange(0, _MAX_WORKERS, hint="0 excludes such nodes")
"""The range of `nproc_per_node` in a rule of `nodes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of a job: its key, such as `entrypoint.script`, what is wrong, and what to do."""

    key: str
    message: str
    hint: str = ""
    also: str = ""
    """A second key that is part of the problem."""


def problems(job: Job) -> list[Problem]:
    """Return all problems of a job."""
    return [
        *_entrypoint_problems(job.entrypoint),
        *_size_problems(job),
        *_rule_problems(job.nodes),
        *_word_problems(job),
        *_output_problems(job),
        *_signal_problems(job),
        *_number_problems(job),
        *_elastic_problems(job),
        *_deadline_problems(job),
        *_name_problems(job),
    ]


def warnings(job: Job) -> list[str]:
    """Return what is odd about a job that can run."""
    found = [
        f"`{name}` is no signal that this system knows; it is left out of signals_to_handle"
        for name in job.signals_to_handle
        if name not in signal.Signals.__members__
    ]
    most = _most_workers(job)
    if beyond := [rank for rank in shown_ranks(job.show) or () if rank >= most]:
        found.append(f"`show` names rank {spans(beyond)}, which no worker can have: the highest rank is {most - 1}")
    return found


def _most_workers(job: Job) -> float:
    """Return the largest number of workers that the job can have; infinity if it is not known."""
    if job.nprocs is not None:
        return job.nprocs
    if not _is_count(job.nproc_per_node, least=1):
        return math.inf
    return job.max_nodes * max([int(job.nproc_per_node), *(rule.nproc_per_node or 0 for rule in job.nodes.values())])


def _entrypoint_problems(entrypoint: Entrypoint) -> list[Problem]:
    given = [kind for kind in ENTRYPOINT_KINDS if getattr(entrypoint, kind) is not None]
    kinds = ", ".join(ENTRYPOINT_KINDS[:-1]) + " or " + ENTRYPOINT_KINDS[-1]
    if not given:
        return [Problem(key="entrypoint", message=f"nothing to run: give a {kinds}")]
    if len(given) > 1:
        message = f"both `{given[0]}` and `{given[1]}` are given, but one of {kinds} is expected"
        return [Problem(key=f"entrypoint.{given[1]}", message=message, also=f"entrypoint.{given[0]}")]
    found = []
    kind, target = given[0], str(getattr(entrypoint, given[0]))
    if not target.strip():
        found.append(Problem(key=f"entrypoint.{kind}", message=f"`{kind}` is empty"))
    if kind == "function" and (target.count(":") != 1 or not all(target.split(":"))):
        message = f"`{target}` is not of the form `package.module:function`"
        found.append(Problem(key="entrypoint.function", message=message))
    if kind == "function" and entrypoint.pass_local_rank:
        message, hint = "a function takes no `--local-rank`", "LOCAL_RANK is in its environment"
        found.append(Problem(key="entrypoint.pass_local_rank", message=message, hint=hint))
    if entrypoint.kwargs and kind != "function":
        message = f"a {kind} takes no keyword arguments"
        found.append(Problem(key="entrypoint.kwargs", message=message, hint="use `args`"))
    return found


def _size_problems(job: Job) -> Iterator[Problem]:
    try:
        low, high = node_range(job.nnodes)
    except ValueError as error:
        yield Problem(key="nnodes", message=str(error), hint="for example `2` or `1:4`")
    else:
        if low < 1:
            yield Problem(key="nnodes", message="at least one node is needed")
        elif low > high:
            message = f"the minimum ({low}) is larger than the maximum ({high})"
            yield Problem(key="nnodes", message=message, hint=f"did you mean `{high}:{low}`?")
        else:
            yield from _range_problem("nnodes", high, _NODES)
            workers = int(job.nproc_per_node) if _is_count(job.nproc_per_node, least=1) else 1
            if high <= _NODES.most and high * workers > _WORKERS.most:
                message = f"{high} nodes with {job.nproc_per_node} workers each are too many"
                hint = f"the limit is {_WORKERS.most:,} workers"
                yield Problem(key="nproc_per_node", message=message, hint=hint, also="nnodes")
    if not _is_count(job.nproc_per_node, least=1) and job.nproc_per_node not in NPROC_WORDS:
        message = f"`{_written(job.nproc_per_node)}` is neither a number of workers nor one of {', '.join(NPROC_WORDS)}"
        hint = _near_miss(_written(job.nproc_per_node), NPROC_WORDS) or "for example `8`, or `gpu` for one on each GPU"
        yield Problem(key="nproc_per_node", message=message, hint=hint)
    if job.gpus_per_worker != "auto" and not _is_gpu_count(job.gpus_per_worker):
        message = f"`{_written(job.gpus_per_worker)}` is neither a number of GPUs nor auto"
        hint = "" if isinstance(job.gpus_per_worker, str) else "a whole number, or a part of one GPU such as `0.5`"
        yield Problem(key="gpus_per_worker", message=message, hint=hint)


def _is_count(value: int | str, *, least: int) -> bool:
    if isinstance(value, str):
        return is_number(value) and int(value) >= least
    return least <= value <= _RULE_WORKERS.most


def _is_gpu_count(value: float | str) -> bool:
    """Return whether Ray can reserve this number of GPUs: whole ones, or a part of one."""
    if isinstance(value, str):
        return _is_count(value, least=0)
    return 0 <= value <= _RULE_WORKERS.most and (value < 1 or value == int(value))


def _near_miss(word: str, words: Sequence[str], cutoff: float = 0.6) -> str:
    close = get_close_matches(word, words, n=1, cutoff=cutoff)
    return f"did you mean `{close[0]}`?" if close else ""


def _rule_problems(nodes: dict[str, NodeRule]) -> Iterator[Problem]:
    for which, rule in nodes.items():
        key = f"nodes.{which}"
        if wrong := node_rules.problem(which):
            yield Problem(key=key, message=wrong, hint="for example `10.0.0.7`, `10.1.0.0/16` or `label:zone=a`")
        if rule.nproc_per_node is not None:
            yield from _range_problem(f"{key}.nproc_per_node", rule.nproc_per_node, _RULE_WORKERS)
        yield from _variable_problems(f"{key}.env", rule.env)


def _variable_problems(key: str, env: dict[str, str]) -> Iterator[Problem]:
    for name, value in env.items():
        if not name or "=" in name or "\0" in name:
            yield Problem(key=f"{key}.{name}", message=f"`{name}` cannot name an environment variable")
        elif "\0" in value:
            yield Problem(key=f"{key}.{name}", message="an environment variable cannot hold a zero byte")
        elif value == HIDDEN and is_secret(name):
            message = f"`{HIDDEN}` stands for a secret that was not written down"
            yield Problem(
                key=f"{key}.{name}", message=message, hint=f"set {name} again, or omit it and set it in the environment"
            )


def _word_problems(job: Job) -> Iterator[Problem]:
    for key, words in (
        ("placement", PLACEMENTS),
        ("preemption_notices", NOTICES),
        ("start_method", tuple(StartMethod)),
        ("log_layout", LOG_LAYOUTS),
        ("event_log_handler", EVENT_LOG_HANDLERS),
        ("progress", PROGRESS_KINDS),
        ("numa_binding", NUMA_BINDINGS),
    ):
        value = getattr(job, key)
        if value is not None and value not in words:
            message = f"`{value}` is not one of {', '.join(words)}"
            yield Problem(key=key, message=message, hint=_near_miss(value, words))
    if job.logs_specs != "default":
        message = f"`{job.logs_specs}` is not `default`, the only one here: raylaunch decides itself where files go"
        hint = "`tee`, `redirects`, `local_ranks_filter`, `show` and `log_dir` say what is shown, and where files are"
        yield Problem(key="logs_specs", message=message, hint=hint)
    for key in ("role", "log_dir", "master_addr"):
        value = getattr(job, key)
        if value is not None and not value.strip():
            yield Problem(key=key, message=f"`{key}` is empty")


def _output_problems(job: Job) -> Iterator[Problem]:
    for key, read in (
        ("show", shown_ranks),
        ("redirects", outputs.mask),
        ("tee", outputs.mask),
        ("local_ranks_filter", outputs.local_ranks),
    ):
        try:
            read(getattr(job, key))
        except ValueError as error:
            yield Problem(key=key, message=str(error))


def _signal_problems(job: Job) -> Iterator[Problem]:
    known = signal.Signals.__members__
    for key in ("signals_to_handle", "signals_to_forward"):
        for index, name in enumerate(getattr(job, key)):
            where = f"{key}.{index}"
            if name in ("SIGKILL", "SIGSTOP"):
                yield Problem(key=where, message=f"no program can handle {name}", hint="omit it")
            elif key == "signals_to_forward" and name not in known:
                full = f"SIG{name.strip().upper().removeprefix('SIG')}"
                hint = f"did you mean `{full}`?" if full in known else _near_miss(full, list(known), cutoff=0.8)
                yield Problem(key=where, message=f"`{name}` is not a signal", hint=hint)
            elif key == "signals_to_forward" and name in job.signals_to_handle:
                yield Problem(
                    key=where,
                    message=f"{name} cannot both end the run and be passed on while it runs",
                    hint="name it in one of signals_to_handle and signals_to_forward",
                    also=f"signals_to_handle.{job.signals_to_handle.index(name)}",
                )


def _number_problems(job: Job) -> Iterator[Problem]:
    for key, allowed in _RANGES.items():
        value = getattr(job, key)
        if value is not None and not isinstance(value, str):
            yield from _range_problem(key, value, allowed)
    if not 0 <= job.master_port <= _MAX_PORT:
        message = f"{_written(job.master_port)} is not a port: 0 (a free one) to {_MAX_PORT} is expected"
        yield Problem(key="master_port", message=message)


def _range_problem(key: str, value: float, allowed: _NumberRange) -> Iterator[Problem]:
    if found := _out_of_range(value, allowed):
        yield Problem(key=key, message=found[0], hint=found[1])


def _out_of_range(value: float, allowed: _NumberRange) -> tuple[str, str] | None:
    """Return what is wrong with a number, and a hint or ""; None if it is in the range."""
    text = _written(value)
    if isinstance(value, float) and math.isnan(value):
        return "nan is not a number", allowed.hint
    if allowed.above and value <= allowed.least:
        return f"{text} seconds is no time: more than {allowed.least:g} is expected", allowed.hint
    if value < allowed.least:
        unit = " seconds" if allowed.is_time and allowed.least else ""
        return f"{text}{unit} is less than {allowed.least:g}", allowed.hint or f"{allowed.least:g} or more is expected"
    if value <= allowed.most or (allowed.endless and math.isinf(value)):
        return None
    if allowed.is_time:
        named = "a year" if allowed.most == _YEAR else "a day"
        return f"{text} seconds is more than {named}", allowed.hint or f"a day is {_DAY}, a year is {_YEAR}"
    return f"{text} is too large: the limit is {allowed.most:,}", ""


def _written(value: float | str) -> str:
    """Return a number as text. Python cannot make text of an integer that is too long."""
    try:
        return value if isinstance(value, str) else f"{value:.12g}"
    except OverflowError:
        return "this number"


def _elastic_problems(job: Job) -> Iterator[Problem]:
    if job.multiple_of >= 1 and (sizes := _no_multiple(job)):
        message = f"no world size is a multiple of {job.multiple_of}: {sizes}"
        yield Problem(key="multiple_of", message=message, also="nnodes" if job.nprocs is None else "nprocs")
    if isinstance(job.hang_timeout, str) and job.hang_timeout not in HANG_WORDS:
        message = f"`{job.hang_timeout}` is neither a number of seconds nor one of {', '.join(HANG_WORDS)}"
        close = "omit the quotes" if _is_count(job.hang_timeout, least=1) else ""
        close = close or _near_miss(job.hang_timeout.lower(), HANG_WORDS)
        hint = close or "for example `600`; `off` stands for never"
        yield Problem(key="hang_timeout", message=message, hint=hint)


def _deadline_problems(job: Job) -> Iterator[Problem]:
    if job.deadline is not None and job.deadline != AUTO_DEADLINE and not _DEADLINE.fullmatch(job.deadline):
        message = f"`{job.deadline}` is neither a time, a duration nor {AUTO_DEADLINE}"
        yield Problem(key="deadline", message=message, hint=DEADLINE_EXAMPLE)


def _no_multiple(job: Job) -> str:
    """Return the possible world sizes if none is a multiple of `multiple_of`, else "". "" too if they are not known."""
    if job.nprocs is not None:
        return f"`nprocs` is {job.nprocs}" if job.nprocs % job.multiple_of else ""
    is_known = _is_count(job.nproc_per_node, least=1) and all(
        rule.nproc_per_node is None for rule in job.nodes.values()
    )
    try:
        low, high = node_range(job.nnodes)
    except ValueError:
        return ""
    if not is_known or not 1 <= low <= high <= _NODES.most:
        return ""
    each = int(job.nproc_per_node)
    nodes = job.multiple_of // math.gcd(job.multiple_of, each)  # the number of nodes must be a multiple of this
    if high // nodes * nodes >= low:
        return ""
    return (
        f"{job.nnodes} x {each} workers" if low == high else f"{low} to {high} nodes with {count(each, 'worker')} each"
    )


def _name_problems(job: Job) -> Iterator[Problem]:
    for key in ("name", "run_id"):
        value = getattr(job, key)
        if value is None:
            continue
        hidden = next((char for char in value if not char.isprintable()), "")
        if not value.strip() or "/" in value or value in (".", ".."):
            yield Problem(key=key, message=f"`{value}` cannot name a folder")
        elif hidden:
            yield Problem(key=key, message=f"the character U+{ord(hidden):04X} cannot be part of a name")
        elif len(value.encode()) > _MAX_NAME_BYTES:
            yield Problem(key=key, message=f"a name cannot have more than {_MAX_NAME_BYTES} bytes")
    for key, text in _texts(job):
        if "\0" in text:
            yield Problem(key=key, message="a zero byte is not allowed here")
    yield from _variable_problems("env", job.env)
    if isinstance(job.preload, str) and job.preload != AUTO_PRELOAD:
        message = f"`{job.preload}` is neither a list of modules nor {AUTO_PRELOAD}"
        hint = _near_miss(job.preload.lower(), (AUTO_PRELOAD,)) or f"for example `[{job.preload or 'torch'}]`"
        yield Problem(key="preload", message=message, hint=hint)


def _texts(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the key and the value of each text that is passed to the operating system, without `name` and `env`."""
    entry = job.entrypoint
    yield from ((f"entrypoint.{kind}", getattr(entry, kind) or "") for kind in ENTRYPOINT_KINDS)
    if entry.kind != "function":
        yield from ((f"entrypoint.args.{index}", str(text)) for index, text in enumerate(entry.args))
    for key in ("role", "master_addr", "log_dir", "log_line_prefix_template"):
        yield key, getattr(job, key) or ""
    yield "ray.address", job.ray.address
    yield "ray.working_dir", job.ray.working_dir or ""
    if not isinstance(job.preload, str):
        yield from ((f"preload.{index}", name) for index, name in enumerate(job.preload))
