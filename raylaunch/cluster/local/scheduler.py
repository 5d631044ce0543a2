"""By when a run must be over: what the job says, or Slurm or Kubernetes, which runs this process."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from raylaunch.core.job.job import Job
from raylaunch.core.job.validation import AUTO_DEADLINE, DEADLINE_EXAMPLE
from raylaunch.core.text import duration
from raylaunch.errors import ConfigError

DEADLINE_VARIABLE = "RAYLAUNCH_DEADLINE"
USUAL_GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL: Slurm's KillWait and Kubernetes' terminationGracePeriodSeconds by default."""

_YEAR = timedelta(days=366)
"""The latest end. Slurm tells 365 days for a job without a limit, by a clock that may be ahead of this machine's."""
_NUMBER = r"([0-9]{1,9}(?:\.[0-9]{1,9})?)"
_DURATION = re.compile(rf"(?:{_NUMBER}d)?(?:{_NUMBER}h)?(?:{_NUMBER}m)?(?:{_NUMBER}s?)?")
_TIME_OF_DAY = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])(?::([0-5][0-9]))?")
_ASK_SECONDS = 10.0
_ENDLESS = ("", "NONE", "N/A", "Unknown", "UNLIMITED")
"""What Slurm tells in place of a time."""


def with_end(job: Job, environ: Mapping[str, str], say: Callable[[str], None]) -> Job:
    """Return the job with its deadline as a moment, in ISO 8601; None: it has none. `say` takes a line for a person.

    With `auto`, it has the usual grace, unless it has another one. Raises ConfigError.
    """
    if job.deadline is None:
        return job
    now = datetime.now().astimezone()
    text = job.deadline
    if text == AUTO_DEADLINE:
        job = replace(job, grace=job.grace or USUAL_GRACE)
        text = environ.get(DEADLINE_VARIABLE) or _of_scheduler(environ)
        if not text:
            say(f"the scheduler tells no end of the run: it saves at a signal, within {job.grace:g} s (`grace`)")
            return replace(job, deadline=None)
    try:
        end = end_of(text, now)
    except ValueError as error:
        where = f"{DEADLINE_VARIABLE} is wrong: " if text != job.deadline else ""
        raise ConfigError(f"{where}{error}", hint=DEADLINE_EXAMPLE) from None
    if end <= now:
        ago = duration(round((now - end).total_seconds()))
        msg = f"the deadline of the run, {end.isoformat(' ', 'seconds')}, was {ago} ago: nothing was started"
        raise ConfigError(msg, hint="give `deadline` a time that is to come, or omit it")
    return replace(job, deadline=end.isoformat(timespec="milliseconds"))


def _of_scheduler(environ: Mapping[str, str]) -> str:
    """Return the end that the scheduler tells; "": it tells none. Raises ConfigError if there is no scheduler."""
    job_id = environ.get("SLURM_JOB_ID", "")
    if job_id:
        epoch = environ.get("SLURM_JOB_END_TIME", "")
        if epoch.isascii() and epoch.isdigit():
            return datetime.fromtimestamp(int(epoch)).astimezone().isoformat()
        return _told_by_slurm(job_id)
    if "KUBERNETES_SERVICE_HOST" in environ:
        return ""
    msg = f"`deadline: auto` has nobody to ask: neither SLURM_JOB_ID, {DEADLINE_VARIABLE} nor Kubernetes is there"
    hint = f"give the time, {DEADLINE_EXAMPLE.partition(', or ')[0]}, or set {DEADLINE_VARIABLE}"
    raise ConfigError(msg, hint=hint)


def _told_by_slurm(job_id: str) -> str:
    """Ask Slurm for the end of a job: versions before 23.02 do not set SLURM_JOB_END_TIME."""
    if not re.fullmatch(r"[0-9A-Za-z_\[\]-]+", job_id):
        raise ConfigError(f"SLURM_JOB_ID is no id of a job: {job_id!r}")
    whys = []
    for command, found in (
        (("squeue", "-h", "-j", job_id, "-o", "%e"), r"\s*(\S*)"),
        (("scontrol", "show", "job", job_id), r".*?\bEndTime=(\S*)"),
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=True)  # noqa: S603
        except (OSError, subprocess.SubprocessError) as error:
            whys.append(f"`{command[0]}`: {str(getattr(error, 'stderr', '') or error).strip()}")
            continue
        match = re.match(found, done.stdout, re.DOTALL)
        told = match[1] if match else ""
        return "" if told in _ENDLESS else told
    msg = f"Slurm does not tell the end of job {job_id}: {'; '.join(whys)}"
    raise ConfigError(msg, hint=f"set {DEADLINE_VARIABLE}, or give `deadline` a time")


def end_of(deadline: str, now: datetime) -> datetime:
    """Return the moment that a deadline means. `now`: the local time, with its zone. Raises ValueError."""
    text = deadline.strip()
    if (found := _DURATION.fullmatch(text)) and text:
        days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
        length = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        if length > _YEAR:
            msg = f"`{deadline}` is more than a year"
            raise ValueError(msg)
        return now + length
    if found := _TIME_OF_DAY.fullmatch(text):
        hour, minute, second = (int(part or 0) for part in found.groups())
        today = now.replace(hour=hour, minute=minute, second=second, microsecond=0)
        return today if today > now else today + timedelta(days=1)
    try:
        moment = moment_of(text)
    except ValueError:
        msg = f"`{deadline}` is neither a time nor a duration"
        raise ValueError(msg) from None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=now.tzinfo)
    if moment - now > _YEAR:
        msg = f"`{deadline}` is more than a year from now"
        raise ValueError(msg)
    return moment


def moment_of(text: str) -> datetime:
    """Return the moment that a text in ISO 8601 names, which may end in `Z`. Raises ValueError."""
    with_microseconds = re.sub(r"\.(\d{1,6})\d*", lambda found: f".{found[1]:0<6}", re.sub("[zZ]$", "+00:00", text))
    return datetime.fromisoformat(with_microseconds)
