"""By when a run must be over, as the job, Slurm or Kubernetes says it; and a run that ends in time."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from raylaunch.cluster.local import scheduler
from raylaunch.core.job.job import Job
from raylaunch.errors import ConfigError

NOW = datetime(2026, 11, 26, 17, 0, tzinfo=timezone(timedelta(hours=1)))


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("3h50m", "2026-11-26T20:50:00+01:00"),
        ("90", "2026-11-26T17:01:30+01:00"),
        ("1.5h", "2026-11-26T18:30:00+01:00"),
        ("1d2h3m4s", "2026-11-27T19:03:04+01:00"),
        ("18:30", "2026-11-26T18:30:00+01:00"),
        ("16:30:05", "2026-11-27T16:30:05+01:00"),
        ("2026-11-26T18:30:00", "2026-11-26T18:30:00+01:00"),
        ("2026-11-26T17:30:00.5Z", "2026-11-26T17:30:00.500000+00:00"),
        ("2026-11-25 18:30", "2026-11-25T18:30:00+01:00"),
    ],
)
def test_moments(text, end):
    assert scheduler.end_of(text, NOW).isoformat() == end


@pytest.mark.parametrize("text", ["", "soon", "3x", "2026-13-01", "400d", "2028-01-01"])
def test_no_moments(text):
    with pytest.raises(ValueError, match="`"):
        scheduler.end_of(text, NOW)


def end(job: Job, environ: dict[str, str] | None = None) -> tuple[Job, list[str]]:
    said: list[str] = []
    return scheduler.with_end(job, environ or {}, said.append), said


def is_in(seconds: float, job: Job, began: datetime) -> bool:
    """Whether the deadline was so far away at some time since the test began; Slurm tells whole seconds."""
    assert job.deadline is not None
    length, rounding = timedelta(seconds=seconds), timedelta(seconds=1)
    return began + length - rounding <= scheduler.moment_of(job.deadline) <= now() + length


def now() -> datetime:
    return datetime.now(timezone.utc)


def test_without_a_deadline():
    assert end(Job()) == (Job(), [])


def test_a_duration_becomes_a_moment():
    """Which stays what it is for a driver that takes over."""
    began = now()
    job, said = end(Job(deadline="1h"))
    assert is_in(3600, job, began)
    assert end(job) == (job, said)


def test_a_deadline_that_is_past():
    """Nothing was started, and the error says what to do."""
    with pytest.raises(ConfigError, match=r"the deadline of the run, 2026-01-01 .*nothing was started") as caught:
        end(Job(deadline="2026-01-01T00:00:00Z"))
    assert caught.value.hint == "give `deadline` a time that is to come, or omit it"


def test_auto_without_a_scheduler():
    with pytest.raises(ConfigError, match="`deadline: auto` has nobody to ask") as caught:
        end(Job(deadline="auto"))
    assert "set RAYLAUNCH_DEADLINE" in caught.value.hint


def test_auto_takes_the_variable_first():
    """It has the forms of the setting."""
    began = now()
    job, _ = end(Job(deadline="auto"), {"RAYLAUNCH_DEADLINE": "2h", "SLURM_JOB_ID": "7"})
    assert is_in(7200, job, began)
    assert job.grace == 30.0
    with pytest.raises(ConfigError, match="RAYLAUNCH_DEADLINE is wrong: `late` is neither"):
        end(Job(deadline="auto"), {"RAYLAUNCH_DEADLINE": "late"})


def test_auto_in_slurm_that_tells_the_end():
    began = now()
    at = int(began.timestamp()) + 600
    job, _ = end(Job(deadline="auto", grace=5.0), {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(at)})
    assert is_in(600, job, began)
    assert job.grace == 5.0, "what the job says holds"


def programs(folder: Path, **scripts: str) -> None:
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o700)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A folder whose programs are found first."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def in_an_hour() -> str:
    """A local time without a zone, as Slurm tells it."""
    return (datetime.now().astimezone() + timedelta(hours=1)).replace(tzinfo=None).isoformat(timespec="seconds")


def test_auto_asks_squeue(path):
    began = now()
    programs(path, squeue=f'[ "$*" = "-h -j 7 -o %e" ] && echo {in_an_hour()}')
    job, _ = end(Job(deadline="auto"), {"SLURM_JOB_ID": "7"})
    assert is_in(3600, job, began)


def test_a_slurm_job_without_a_limit_has_a_year(path):
    """By the clock of another machine, which is ahead."""
    began = now()
    at = int((began + timedelta(days=365, minutes=2)).timestamp())
    job, _ = end(Job(deadline="auto"), {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(at)})
    assert is_in(at - began.timestamp(), job, began)


def test_auto_asks_scontrol_where_squeue_fails(path):
    began = now()
    programs(
        path,
        squeue="exit 1",
        scontrol=f'echo "JobId=7 StartTime=2026-01-01T00:00:00\\n   EndTime={in_an_hour()} Deadline=N/A"',
    )
    job, _ = end(Job(deadline="auto"), {"SLURM_JOB_ID": "7"})
    assert is_in(3600, job, began)


def test_slurm_that_tells_nothing(path):
    programs(path, squeue="echo no such job >&2; exit 1", scontrol="exit 2")
    with pytest.raises(ConfigError, match="Slurm does not tell the end of job 7: `squeue`: no such job; `scontrol`: "):
        end(Job(deadline="auto"), {"SLURM_JOB_ID": "7"})
    with pytest.raises(ConfigError, match="SLURM_JOB_ID is no id"):
        end(Job(deadline="auto"), {"SLURM_JOB_ID": "7; rm"})


@pytest.mark.parametrize("told", ["NONE", "N/A", "Unknown"])
def test_a_slurm_job_without_an_end(path, told):
    programs(path, squeue=f"echo {told}")
    job, said = end(Job(deadline="auto"), {"SLURM_JOB_ID": "7"})
    assert (job.deadline, job.grace) == (None, 30.0)
    assert said == ["the scheduler tells no end of the run: it saves at a signal, within 30 s (`grace`)"]


def test_kubernetes_tells_no_end():
    """But it sends SIGTERM, and SIGKILL half a minute later."""
    job, said = end(Job(deadline="auto"), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert (job.deadline, job.grace, len(said)) == (None, 30.0, 1)
