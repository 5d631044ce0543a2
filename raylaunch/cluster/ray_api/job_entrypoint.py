"""What Ray shows of this process in its list of jobs: the command line and facts of the run, without secrets.

Ray keeps it in the head, for everybody who may look at the dashboard, also after the job.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from raylaunch.cluster.agent.serialization import version
from raylaunch.core.job.job import Job
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.job.secrets import shown_arguments
from raylaunch.core.text import printable
from raylaunch.node.linux.procfs import user_name


def text(secrets: Redactor) -> str:
    """Return the command line of this process as Ray may keep it. Ray accepts only what UTF-8 can encode."""
    return printable(subprocess.list2cmdline(map(secrets.hide, shown_arguments(sys.orig_argv))))


def metadata(job: Job, secrets: Redactor) -> dict[str, str]:
    """Return facts of a run, for the metadata of its job. Its folder and its nodes are not known yet."""
    found = {
        "raylaunch_version": version(),
        "run_name": job.title,
        "run_id": job.run_id or "",
        "nnodes": str(job.nnodes),
        "nproc_per_node": str(job.nproc_per_node),
        "user": user_name(),
        "driver": f"process {os.getpid()} on {socket.gethostname()}",
    }
    return {name: printable(secrets.hide(fact)) for name, fact in found.items() if fact}
