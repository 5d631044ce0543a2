"""The folder of the benches: a Ray that is started below it must be able to bind its sockets."""

from __future__ import annotations

from tools.bench import contenders, processes

LONGEST = "ray/session_2026-12-31_23-59-59_999999_4194304/sockets/plasma_store"
"""What Ray adds to TMPDIR, with the largest process id of Linux."""
MOST = 107
"""Bytes of the path of a Unix socket."""


def test_sockets_of_ray_fit(monkeypatch, tmp_path):
    """Also where TMPDIR is long, and after many runs."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with processes.scratch() as scratch:
        folder = contenders.new_folder(scratch, contenders.RAYLAUNCH)
        assert len(f"{folder}99/{LONGEST}") <= MOST
    assert not scratch.exists()
