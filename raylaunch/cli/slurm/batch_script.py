"""`raylaunch slurm`: writes the batch script of a job, and submits it."""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence

from raylaunch.cli.args import flag_values, parser
from raylaunch.cli.config import load
from raylaunch.core.job.job import Job, is_number
from raylaunch.errors import ConfigError, ExitCode

_AUTHENTICATION = r"""
# Only the processes of this job know the token of its Ray cluster.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
"""
_GO_ON = f"""\
code=$?
if [ $code -eq {ExitCode.RESUMABLE} ]; then # it has saved, and is not done
  task=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}} # SLURM_JOB_ID may be the id of all tasks
  scontrol requeue "${{task:-$SLURM_JOB_ID}}" || sbatch ${{task:+--array="$SLURM_ARRAY_TASK_ID"}} "$0"
fi
exit $code
"""
_COME_BACK = f"""\
code=$?
if [ $code -eq {ExitCode.RESUMABLE} ]; then # it was drained; SLURM_JOB_ID may be the id of all nodes
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
fi
exit $code
"""


def slurm(arguments: Namespace, environ: Mapping[str, str]) -> int:
    """Print the batch script of a job, or submit it. Raises ConfigError."""
    if arguments.job_file is None or not arguments.job_file.endswith(parser.JOB_FILE_SUFFIXES):
        raise ConfigError("`slurm` needs a job file", hint="for example `raylaunch slurm conf/job.yaml`")
    notice = flag_values.number(arguments.notice, "--notice")
    words = [arguments.job_file, *arguments.settings]
    if arguments.elastic:
        words.append(f"nnodes={arguments.elastic}")
    job = load.load(parser.parse(words, environ), environ)
    if job.ray.address != "auto":
        raise ConfigError(f"`ray.address` is `{job.ray.address}`, but a Slurm job starts a Ray cluster of its own")
    script = _elastic_script if arguments.elastic else _script
    text = script(job, [*words, *_settings(job, notice)], arguments.rest, notice)
    if not arguments.submit:
        print(text, end="")
        return ExitCode.OK
    try:
        return subprocess.run(["sbatch"], input=text, text=True, check=False).returncode  # noqa: S607
    except FileNotFoundError as error:
        hint = "call it where jobs are submitted, or without `--submit` to print the script"
        raise ConfigError("there is no `sbatch` on this machine", hint=hint) from error


def _settings(job: Job, notice: int) -> list[str]:
    """Return what the job needs to save before its end, as far as its file does not say so."""
    return [*([] if job.deadline else ["deadline=auto"]), *([] if job.grace else [f"grace={notice}"])]


def _script(job: Job, words: Sequence[str], flags: Sequence[str], _notice: int) -> str:
    """Return the script of a job whose nodes are all in one Slurm job."""
    nodes = f"{job.min_nodes}-{job.max_nodes}" if job.min_nodes < job.max_nodes else f"{job.max_nodes}"
    options = [
        *(f"--job-name={job.title}", f"--nodes={nodes}", "--ntasks-per-node=1", *_resources(job)),
        *(["--no-kill"] if job.min_nodes < job.max_nodes else []),
        *("--requeue", "--open-mode=append"),
    ]
    return "".join(
        ["#!/bin/bash\n", _directives(options, flags), _AUTHENTICATION, f"\n{_srun('run', words)}\n", _GO_ON]
    )


def _elastic_script(job: Job, words: Sequence[str], flags: Sequence[str], notice: int) -> str:
    """Return the script of a job that submits each of its nodes as a Slurm job."""
    options = [f"--job-name={job.title}", "--ntasks=1", "--requeue", "--open-mode=append"]
    node_options = [
        *(f"--job-name={job.title}-node", f"--array=1-{job.max_nodes}", "--nodes=1", "--ntasks-per-node=1"),
        *(*_resources(job), "--requeue", "--open-mode=append", f"--signal=TERM@{notice}"),
    ]
    node = [
        *(
            "#!/bin/bash\n",
            _directives(node_options, flags),
            f"\nexport RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S={notice}\n",
        ),
        *(f"{_srun('join', [])}\n", _COME_BACK),
    ]
    return "".join(
        [
            *("#!/bin/bash\n", _directives(options), _AUTHENTICATION),
            "\n# This job has Ray's head and the driver. Each node is a job of its own, which may be taken away:\n",
            *(f"{_srun('lead', words)} << 'NODE'\n", *node, "NODE\n", _GO_ON),
        ]
    )


def _resources(job: Job) -> list[str]:
    """Return what Slurm shall give a node, as far as the job says so; else the whole of it."""
    if not is_number(str(job.nproc_per_node)) or job.nprocs is not None:
        return ["--exclusive"]
    workers = int(job.nproc_per_node)
    options = [f"--cpus-per-task={math.ceil(workers * job.cpus_per_worker)}"]
    if not isinstance(job.gpus_per_worker, str) and job.gpus_per_worker:
        options.append(f"--gpus-per-node={math.ceil(workers * job.gpus_per_worker)}")
    return options


def _directives(options: Sequence[str], flags: Sequence[str] = ()) -> str:
    """Return lines for sbatch. A person's own flags are last, since the last one counts."""
    lines = [*([option] for option in options), *([flags] if flags else [])]
    return "".join(f"#SBATCH {' '.join(map(_quoted, line))}\n" for line in lines)


def _quoted(word: str) -> str:
    """Return a word as sbatch reads it: other than a shell, it takes a backslash for an escape in any quotes."""
    return word if shlex.quote(word) == word else '"' + word.replace("\\", r"\\").replace('"', r"\"") + '"'


def _srun(role: str, words: Sequence[str]) -> str:
    command = [sys.executable, "-m", "raylaunch.cli.slurm.node_program", role, *words]
    return f"srun --kill-on-bad-exit=0 {shlex.join(command)}"
