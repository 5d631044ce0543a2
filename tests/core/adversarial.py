"""Texts on which a careless pattern takes quadratic time, and a measure of how the time of a function grows."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

UNITS = (
    *("gloo ", "gloo", "nccl ", "watchdog ", "connection ", "wait timeout ", "address already ", "DataLoader worker ("),
    *(
        "No module named ",
        "CUDA out of ",
        "a",
        "A",
        "1",
        "0x",
        "0xf",
        "_",
        ".",
        "-",
        " ",
        "\t",
        "\n",
        "\n\n ",
        "\r",
        "é",
    ),
    *("key", "token", "token=", "token: ", "key ", "password'", "--key", "a.", "a=", "a :", "pass_", "aB"),
    *(
        "://",
        "://a",
        "://a:",
        "://a:1/",
        "://a@",
        "http://",
        "http://a@",
        "http://a:b@",
        "a://b:c/",
        "@",
        ":",
        "/",
        "***",
    ),
    *('File "', '  File "', '  File "x", line ', '  File "x", line 1', '  File "x", line 1 in ', '\n  File "', "| "),
    *(
        "Thread 0x",
        "Thread 0xa",
        "Current thread ",
        "(most recent call first)",
        "raylaunch/worker/",
        "a/",
        " in ",
        "/lib",
    ),
    *(
        "/torch/distributed/",
        "/torch/autograd/",
        "python3",
        "[",
        "]",
        "{",
        "}",
        '{"',
        "${",
        "$",
        "\\",
        '"',
        "'",
        "`",
        ",",
    ),
)
"""What the texts repeat."""
_SMALL = 1_000
_FACTOR = 4
_REPEATS = 1
LIMIT = 9.0
"""Time for four times the text: linear is 4, quadratic 16."""
_MEASURABLE_SECONDS = 0.001


def steep(function: Callable[[str], object]) -> list[tuple[str, float]]:
    """Return the units on which the time of a function grows faster than its text, with the growth. CPU time counts."""
    found = []
    for unit in UNITS:
        growth = 0.0
        for repeats in (_REPEATS, 4 * _REPEATS):
            small, large = (
                _seconds(function, unit * (size // len(unit)), repeats) for size in (_SMALL, _FACTOR * _SMALL)
            )
            growth = large / small if large > _MEASURABLE_SECONDS else 0.0
            if growth < LIMIT:
                break
        if growth >= LIMIT:
            found.append((unit, growth))
    return found


def _seconds(function: Callable[[str], object], text: str, repeats: int) -> float:
    best = float("inf")
    gc.disable()
    for _ in range(repeats):
        began = time.thread_time()
        function(text)
        best = min(best, time.thread_time() - began)
    gc.enable()
    return max(best, 1e-6)
