"""Which variables tell of the terminal alone."""

from __future__ import annotations

from raylaunch.core.terminal import is_of_a_terminal


def test_the_terminal_is_not_the_job():
    """Another window of the same person is no other environment; a variable of his own is one."""
    assert all(map(is_of_a_terminal, ("COLUMNS", "TMUX_PANE", "SSH_TTY", "TERM", "PWD")))
    assert not any(map(is_of_a_terminal, ("PATH", "LR", "RAY_ADDRESS", "HOME", "PYTHONPATH", "COLUMNS_OF_MINE")))
