"""The text by which Ray shows this process in its list of jobs: the command line, without secrets.

Ray keeps it in the head, for everybody who may look at the dashboard, also after the job. No setting of `ray.init`
chooses it, so the function that makes it is replaced for the time of the call.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from ray._private import utils as ray_utils

from raylaunch.core.job.redaction import Redactor
from raylaunch.core.job.secrets import shown_arguments
from raylaunch.core.text import printable

_FUNCTION = "get_entrypoint_name"
"""In `ray/_private/utils.py` of Ray 2.60; `ray.init` calls it."""


def text(secrets: Redactor) -> str:
    """Return the command line of this process as Ray may keep it. Ray accepts only what UTF-8 can encode."""
    return printable(subprocess.list2cmdline(map(secrets.hide, shown_arguments(sys.orig_argv))))


@contextlib.contextmanager
def redacted(secrets: Redactor) -> Iterator[None]:
    """Have `ray.init` take `text` in this block."""
    original = getattr(ray_utils, _FUNCTION, None)
    if original is None:  # another version of Ray
        yield
        return
    setattr(ray_utils, _FUNCTION, lambda: text(secrets))
    try:
        yield
    finally:
        setattr(ray_utils, _FUNCTION, original)
