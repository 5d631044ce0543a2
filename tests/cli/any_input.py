"""Strategies for whatever people may give to the command: contents of job files, and command lines."""

from __future__ import annotations

import json
from typing import Final

from hypothesis import strategies as st

from raylaunch.cli.args.flags import FLAGS
from raylaunch.core.job.job import Entrypoint, Job, NodeRule, RayOptions

SCRIPT: Final = "entrypoint:\n  script: a.py\n"
_SETTINGS = [
    *Job.__slots__,
    *(f"entrypoint.{name}" for name in Entrypoint.__slots__),
    *(f"ray.{name}" for name in RayOptions.__slots__),
    *(f"nodes.10.0.0.7.{name}" for name in NodeRule.__slots__),
    "env.A",
]
_NAMES = sorted({name.rpartition(".")[2] for name in _SETTINGS})
_YAML = r"""\n|\n  |\n    | |\t|: |, |- |? |[|]|{|}|'|"|>|#|%|---|&a |*a|<<: |!!int |!!binary |!!python/name:os |\\|\0|\x1b"""
_REFERENCES = r"""${|}|${.name}|${env}|${oc.env:|${oc.create:|${oc.select:|???"""
_VALUES = r"""null|true|0|1|2|0.5|-1|1e3|.inf|.nan|1e999|0x1f|999999999999|1:4|0:3,1:2|auto|all|none|off|gpu|pack|spread|..|/"""
_special = st.sampled_from(
    [text.encode().decode("unicode_escape") for text in f"{_YAML}|{_REFERENCES}|{_VALUES}".split("|")]
    + ["|", "é", "\u2028", "\ufeff", "'\\ud800'", "\ud800", "\U0001f600"]
)
"""What is special in YAML, in references and in the values of settings."""
_piece = _special | st.sampled_from(_NAMES).map(lambda name: f"\n{name}: ") | st.text(max_size=5)
_stretched = st.tuples(_piece, st.sampled_from([1, 1, 1, 2, 70, 3000])).map(lambda drawn: drawn[0] * drawn[1])
_structure = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | _special,
    lambda inside: st.lists(inside) | st.dictionaries(st.sampled_from(_NAMES) | st.text(max_size=5), inside),
    max_leaves=12,
)


def _text(start: str) -> st.SearchStrategy[bytes]:
    texts = st.lists(_stretched, max_size=12).map(lambda drawn: start + "".join(drawn))
    return texts.map(lambda text: text.encode("utf-8", "surrogatepass"))


contents: st.SearchStrategy[bytes] = (
    st.binary(max_size=200)
    | _text("")
    | _text(SCRIPT)
    | _structure.map(lambda value: json.dumps({"entrypoint": {"script": "a.py"}, "env": value}).encode())
    | st.dictionaries(st.sampled_from(_NAMES), _structure).map(lambda value: json.dumps(value).encode())
)
"""Contents of a job file: bytes, text, and values of all types at all places."""

_override = st.tuples(st.sampled_from(_SETTINGS), st.just("=") | st.just(""), _stretched).map("".join)
_flag = st.sampled_from([flag.option for flag in FLAGS if flag.name not in ("end", "help")])
_flag_with_value = st.tuples(_flag, st.just("=") | st.just(""), _stretched).map("".join)
_word = st.sampled_from(["a.py", "--", "check", "-m", "x.json", "-r3"])
arguments: st.SearchStrategy[list[str]] = st.lists(
    _override | _override | _flag | _flag_with_value | _word | _piece, max_size=4
).map(lambda drawn: [word.replace("\0", "") for word in drawn])
"""Arguments of the command. They have no zero bytes: with these, the system ends an argument."""
