"""The settings of a job file: their names and near misses, their types and what does not fit them."""

from __future__ import annotations

from dataclasses import is_dataclass
from difflib import get_close_matches
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
_NEEDLESS = frozenset(
    ("rdzv_backend", "rdzv_endpoint", "rdzv_conf", "standalone", "node_rank", "master_addr", "master_port", "local_addr")
)
_SHOWN = 60


class MisfitError(ValueError):
    """A value is not of the type that its setting has; the text says so in full."""


def inner(hint: Any, name: str | None = None) -> Any:
    """The type of a section's setting or of a list's items; None if there is no such setting."""
    if is_dataclass(hint):
        return get_type_hints(hint).get(name or "")
    return get_args(hint)[-1] if get_origin(hint) in (list, dict) else Any


def names(section: type = Job, prefix: str = "") -> list[str]:
    """All settings with their sections: `entrypoint`, `entrypoint.script` and so on."""
    found = []
    for name, hint in get_type_hints(section).items():
        found.append(prefix + name)
        if is_dataclass(hint):
            found += names(hint, f"{prefix}{name}.")
    return found


def near_miss(key: str) -> str:
    """The setting that was probably meant, `""` if none comes to mind."""
    section, _, name = key.rpartition(".")
    name = name.lstrip("-+~").replace("-", "_").lower()
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
    if key.lstrip("-+~").replace("-", "_") in _NEEDLESS:
        return "leave it out: raylaunch brings the nodes together by itself"
    if key in names():
        section, _, name = key.rpartition(".")
        return f"in a file, write `{name}` in the section `{section}`"
    return f"did you mean `{meant}`?" if (meant := near_miss(key)) else ""


def fitted(hint: Any, value: object, text: str | None = None, *, written: str = "") -> Any:
    """The value as its type wants it; `text` is how the file spells it, `written` the `${...}` it comes from."""
    if hint is Any:
        return value
    if get_origin(hint) is list and isinstance(value, list):
        return [fitted(inner(hint), item, written=written) for item in value]
    if get_origin(hint) is dict and isinstance(value, dict):
        return {str(name): fitted(inner(hint), item, written=written) for name, item in value.items()}
    spelled = _spelled(value) if text is None else text
    for option in get_args(hint) if isinstance(hint, UnionType) else (hint,):
        try:
            return _READERS[option](value, spelled)
        except (KeyError, ValueError):
            continue
    msg = f"{_expected(hint)} is expected, but {_found(value, spelled, written)}"
    raise MisfitError(msg)


def shown(text: str) -> str:
    """A value short enough for a sentence."""
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _whole(value: object, _: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError
    return int(value)


def _number(value: object, _: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    return float(value)


def _text(value: object, spelled: str) -> str:
    # The spelling and not the value: `1.10` is a version, `007` a name and `true` the word for an environment.
    if not isinstance(value, bool | int | float | str):
        raise ValueError  # noqa: TRY004
    return spelled


def _nothing(value: object, _: str) -> None:
    if value is not None:
        raise ValueError


_READERS: dict[Any, Any] = {int: _whole, float: _number, str: _text, NoneType: _nothing}
_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "text"}


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _expected(hint: Any) -> str:
    if is_dataclass(hint) or get_origin(hint) is dict:
        return "a section"
    if get_origin(hint) is list:
        return "a list"
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return " or ".join(_WORDS[option] for option in options if option is not NoneType)


def _found(value: object, spelled: str, written: str) -> str:
    spelled = shown(spelled)
    if written:
        return f"`{shown(written)}` stands for " + ("nothing" if value is None else f"`{spelled}`")
    match value:
        case None:
            return f"`{spelled}` means nothing in YAML" if spelled else "nothing is given"
        case list():
            return "a list is given"
        case dict():
            return "a section is given"
        case bool():
            return f"`{spelled}` is a boolean"
        case int():
            return f"`{spelled}` is a number"
        case float():
            return f"`{spelled}` is a decimal number"
        case _:
            return f"`{spelled}` is text" if spelled.strip() else "it is empty"
