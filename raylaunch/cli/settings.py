"""The settings of a job file: their names and near misses, their types and what does not fit them."""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from raylaunch.core.job import Job

# torchrun's words that go by another name here.
_RENAMED = {
    "rdzv_id": "run_id",
    "training_script": "entrypoint.script",
    "training_script_args": "entrypoint.args",
    "no_python": "entrypoint.command",
    "nproc": "nproc_per_node",
}
_NEEDLESS = re.compile(r"rdzv_(backend|endpoint|conf)|standalone|node_rank|master_(addr|port)|local_addr")
_SHOWN = 60


class MisfitError(ValueError):
    """A value is not of the type that its setting has; the message says so in full."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def inner(hint: Any, name: str | None = None) -> Any:
    """The type of a section's setting or of a list's items; None if there is no such setting."""
    if isinstance(hint, type) and is_dataclass(hint):
        return _types(hint).get(name or "")
    return get_args(hint)[-1] if get_origin(hint) in (list, dict) else Any


def names(section: type = Job, prefix: str = "") -> list[str]:
    """All settings with their sections: `entrypoint`, `entrypoint.script` and so on."""
    found = []
    for name, hint in _types(section).items():
        found.append(prefix + name)
        if isinstance(hint, type) and is_dataclass(hint):
            found += names(hint, f"{prefix}{name}.")
    return found


def near_miss(key: str) -> str:
    """The setting that was probably meant, `""` if none comes to mind."""
    section, _, name = key.rpartition(".")
    name = _underscored(name)
    last = {setting: setting.rpartition(".")[2] for setting in names()}
    beside = {setting: word for setting, word in last.items() if setting.rpartition(".")[0] == section}
    for among in (beside, last):
        if exact := [setting for setting, word in among.items() if word == name]:
            return exact[0]
    if name in _RENAMED:
        return _RENAMED[name]
    for among in (beside, last):
        if close := get_close_matches(name, among.values(), n=1, cutoff=0.7):
            return next(setting for setting, word in among.items() if word == close[0])
    return ""


def advice(key: str) -> str:
    """What to do about a setting that does not exist."""
    if _NEEDLESS.fullmatch(_underscored(key)):
        return "leave it out: raylaunch brings the nodes together by itself"
    if key in names():
        section, _, name = key.rpartition(".")
        return f"write `{name}` in the section `{section}`"
    return f"did you mean `{meant}`?" if (meant := near_miss(key)) else ""


def fitted(hint: Any, value: object, text: str | None = None, *, written: str = "") -> Any:
    """The value as its type wants it.

    `text` is how the file spells it, `written` the `${...}` that it was made from.
    """
    if hint is Any:
        return value
    if get_origin(hint) is list and isinstance(value, list):
        return [fitted(inner(hint), item, written=written) for item in value]
    if get_origin(hint) is dict and isinstance(value, dict):
        return {str(name): fitted(inner(hint), item, written=written) for name, item in value.items()}
    spelled = spell(value) if text is None else text
    for option in get_args(hint) if isinstance(hint, UnionType) else (hint,):
        try:
            return _READERS[option](value, spelled)
        except (KeyError, TypeError, ValueError):
            continue
    msg = f"{_expected(hint)} is expected, but {_found(value, spelled, written)}"
    raise MisfitError(msg, hint="" if written else _remedy(hint, value, spelled))


def spell(value: object) -> str:
    """A value as YAML spells it."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def shown(text: str) -> str:
    """A value short enough for a sentence."""
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


@cache
def _types(section: Any) -> dict[str, Any]:
    return get_type_hints(section)


def _underscored(word: str) -> str:
    """`--Max-Restarts`, as torchrun and Hydra users write it, with our spelling."""
    return word.lstrip("-+~").replace("-", "_").lower()


def _whole(value: object, _: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError
    return int(value)


def _number(value: object, _: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    return float(value)


def _text(value: object, spelled: str) -> str:
    # The spelling and not the value: `1.10` is a version, `007` a name, and an environment wants `true`.
    if not isinstance(value, bool | int | float | str):
        raise TypeError
    return spelled


def _nothing(value: object, _: str) -> None:
    if value is not None:
        raise TypeError


_READERS: dict[Any, Any] = {int: _whole, float: _number, str: _text, NoneType: _nothing}
_WANTED: dict[Any, str] = {int: "a whole number", float: "a number", str: "text"}
_KINDS = {bool: "a boolean", int: "a number", float: "a decimal number", str: "text"}


def _expected(hint: Any) -> str:
    if is_dataclass(hint) or get_origin(hint) is dict:
        return "a section"
    if get_origin(hint) is list:
        return "a list"
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return " or ".join(_WANTED[option] for option in options if option is not NoneType)


def _found(value: object, spelled: str, written: str) -> str:
    if written:
        return f"`{shown(written)}` stands for " + ("nothing" if value is None else f"`{shown(spelled)}`")
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'section'} is given"
    if not spelled.strip():
        return "nothing is given"
    kind = "means nothing in YAML" if value is None else f"is {_KINDS[type(value)]}"
    return f"`{shown(spelled)}` {kind}"


def _remedy(hint: Any, value: object, spelled: str) -> str:
    if value is None and _WANTED.get(hint) == "text":
        return 'write `"~"`' if spelled == "~" else 'write `""` for an empty text'
    if get_origin(hint) is list:
        return "write `[a, b]`" if isinstance(value, dict) or value is None else f"write `[{shown(spelled)}]`"
    return ""
