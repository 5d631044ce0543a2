"""Environment variables of a terminal: two runs of one person may differ in them, and are of one kind all the same."""

from __future__ import annotations

_NAMES = frozenset(
    (
        *("_", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "COLORTERM", "NO_COLOR", "FORCE_COLOR"),
        *("WINDOWID", "WINDOWPATH", "WINDOW", "STY", "GPG_TTY", "XDG_SESSION_ID", "XDG_SEAT", "XDG_VTNR"),
        *("INVOCATION_ID", "JOURNAL_STREAM"),
    )
)
_PREFIXES = (
    *("TERM", "TMUX", "SSH_", "VTE_", "KITTY_", "WEZTERM_", "ALACRITTY_", "ITERM_", "KONSOLE_", "VSCODE_"),
    *("GNOME_TERMINAL_", "LC_TERMINAL", "ZELLIJ"),
)


def is_of_a_terminal(variable: str) -> bool:
    """Whether it says where a command was typed, and nothing of what is to be run."""
    return variable in _NAMES or variable.startswith(_PREFIXES)
