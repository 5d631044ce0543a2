"""Reads the environment of a process, which other threads may change meanwhile."""

from __future__ import annotations

from collections.abc import Mapping


def snapshot(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `os.environ`, without variables that another thread removes in this moment.

    `dict(os.environ)` raises KeyError for them: it lists the names first and looks up each one later. Ray and raylaunch
    set some variables only while they connect, and several runs may be started at once in one process.
    """
    found = [(name, environ.get(name)) for name in list(environ)]
    return {name: value for name, value in found if value is not None}
