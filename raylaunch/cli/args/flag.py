"""What a flag of the command line is. The table of all flags is in `flags`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

Value = str | list[str] | None
"""The value of the setting that a flag sets; None: the flag has no effect, as if it were not given."""


class Group(Enum):
    """The sections of `--help`, in the order in which it prints them. The value is the title."""

    ENTRY = "What runs"
    SIZE = "Size"
    RESTARTS = "Restarts and signals"
    OUTPUT = "Output"
    RENDEZVOUS = "Rendezvous"
    ENVIRONMENT = "Environment of the workers"
    ACCEPTED = "Accepted without effect"
    OURS = "raylaunch only"
    KEYS = "Keys of job files"


def _unchanged(text: str) -> Value:
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag. On the command line, dashes and underscores in its name are the same."""

    name: str
    help: str
    """One line for `--help`. For a flag without effect: what raylaunch does instead."""
    metavar: str = ""
    """The name of its value in `--help`; "" for a switch, which takes no value."""
    short: str = ""
    default: str = ""
    """The default as `--help` shows it; "" shows none."""
    setting: str = ""
    """The config key that it sets; "" where it sets several keys or none."""
    convert: Callable[[str], Value] = _unchanged
    """Makes the value of the setting from the text on the command line."""
    pet: bool = True
    """Whether the environment variable `PET_<NAME>` sets its default, as under torchrun."""
    number_type: type[int | float] | None = None
    """For a flag without effect: the type of number that its value must be."""

    @property
    def option(self) -> str:
        """The flag as written on the command line."""
        return f"--{self.name}"

    @property
    def env_variable(self) -> str:
        """The environment variable that sets its default, if `pet` is true."""
        return "PET_" + self.name.replace("-", "_").upper()
