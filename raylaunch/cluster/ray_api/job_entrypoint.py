"""The text by which Ray shows this process in its list of jobs: the command line, without secrets.

Ray keeps it in the head, for everybody who may look at the dashboard, also after the job.
"""

from __future__ import annotations

import subprocess
import sys

from raylaunch.core.job.redaction import Redactor
from raylaunch.core.job.secrets import shown_arguments
from raylaunch.core.text import printable


def text(secrets: Redactor) -> str:
    """Return the command line of this process as Ray may keep it. Ray accepts only what UTF-8 can encode."""
    return printable(subprocess.list2cmdline(map(secrets.hide, shown_arguments(sys.orig_argv))))
