"""Connects to Ray without the thread by which Ray exports metrics of this process.

OpenTelemetry's `PeriodicExportingMetricReader` is the thread. The core worker of Ray 2.60 starts it in every
process that is connected, whatever `enable_metrics_collection` says, if the node has a metrics agent. It has crashed
processes (SIGSEGV), as in https://github.com/ray-project/ray/pull/60048. With `enable_open_telemetry=0` alone there
would be two threads of OpenCensus, the library before it.

A process of an actor has the thread too. It takes both settings from the environment of `ray start`. A runtime
environment could also bring them, but then Ray starts a new process for each agent, instead of using one that waits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

VARIABLES = ("RAY_enable_metrics_collection", "RAY_enable_open_telemetry")
"""Settings of `src/ray/common/ray_config_def.h`. A process reads them once, when Ray's C++ code is first used."""


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Keep Ray from starting an exporter in this block, unless the person has set one of the variables.

    The variables are removed afterwards: workers and other programs must not inherit them. A process in which Ray was
    used before the first such block exports as before.
    """
    if any(name in os.environ for name in VARIABLES):
        yield
        return
    os.environ.update(dict.fromkeys(VARIABLES, "0"))
    try:
        yield
    finally:
        for name in VARIABLES:
            os.environ.pop(name, None)
