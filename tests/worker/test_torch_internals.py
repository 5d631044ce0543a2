"""What raylaunch does with torch's private parts, where torch itself is not needed."""

from __future__ import annotations

from typing import Any

from raylaunch.worker import torch_internals


def test_functions_whose_defaults_are_instances_are_removed():
    """Of extension modules made with nanobind, and no others: the instances are freed, and nanobind reports nothing."""
    meta: Any = type("nb_type_0", (type,), {"__module__": "nanobind"})
    base = meta("base", (), {})
    function: Any = type("nb_method", (), {"__nb_signature__": (("def g(x: base = \\0)", None, (None, base())),)})
    plain: Any = type(
        "nb_func", (), {"__nb_signature__": (("def f(x: int = \\0)", None, (1,)), ("def f()", None, None))}
    )
    child = meta("child", (base,), {"g": function(), "f": plain(), "value": 3})
    lookalike = type("lookalike", (), {"g": function()})
    torch_internals.release_default_arguments()
    assert not hasattr(child, "g")
    assert hasattr(child, "f")
    assert child.value == 3
    assert hasattr(lookalike, "g")


def test_without_such_modules_nothing_happens():
    """It runs at the end of every worker."""
    torch_internals.release_default_arguments()
