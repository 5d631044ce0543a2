"""Fills the template of the report. Everything foreign in it is escaped, and control characters are made visible."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import jinja2
from markupsafe import Markup, escape

from raylaunch.cli.html_report import plots
from raylaunch.cli.html_report.report_facts import (
    MOST_NODES,
    MOST_SLOW,
    ReportFacts,
    ends_of,
    failure_facts,
    parts,
    settings,
)
from raylaunch.cli.output.progress_line import rate_text
from raylaunch.core.history.time_per_state import TimeState
from raylaunch.core.text import capped, count, duration, printable, spans

_TEMPLATE = "report.html.j2"
_MOST_TEXT = 20_000
"""Characters of one text."""
_MOST_CELL = 400
_SYMBOLS = {
    "failure": "\N{MULTIPLICATION X}",
    "hang": "\N{BLACK DIAMOND}",
    "node lost": "\N{BLACK DOWN-POINTING TRIANGLE}",
    "resize": "\N{LEFT RIGHT ARROW}",
    "request": "\N{CLOCKWISE OPEN CIRCLE ARROW}",
    "stop": "\N{BLACK SQUARE}",
    "": "\N{BULLET}",
}
"""By `Interruption`: a sign besides the colour."""


def html(found: ReportFacts, made_by: str) -> str:
    """Return the page. `made_by`: the version of raylaunch that makes it."""
    history = found.history
    first_attempts, last_attempts = ends_of(history.attempts)
    first_restarts, last_restarts = ends_of(history.restarts)
    rates = plots.drawn_rates(history.rates, history.seconds)
    rows, more_nodes = plots.node_rows(history, MOST_NODES)
    given, defaults = settings(found.job)
    return _COMPILED.render(
        found=found,
        history=history,
        cause=failure_facts(found),
        states=[(state, history.per_state[state]) for state in TimeState],
        state_marks=plots.state_marks(history.spans, history.seconds),
        ticks=plots.time_ticks(history.seconds),
        ceiling=plots.rate_ceiling(rates),
        rate_path=plots.rate_path(rates, history.seconds, plots.rate_ceiling(rates)),
        restart_marks=plots.restart_marks(history),
        interruptions=Counter(str(restart.interruption) for restart in history.restarts),
        symbols=_SYMBOLS,
        first_attempts=first_attempts,
        last_attempts=last_attempts,
        first_restarts=first_restarts,
        last_restarts=last_restarts,
        parts=parts(history.restarts),
        rows=rows,
        more_nodes=more_nodes,
        gpus=found.status.gpus[:MOST_NODES],
        more_gpus=max(0, len(found.status.gpus) - MOST_NODES),
        slow_ranks=history.slow_ranks[:MOST_SLOW],
        more_slow=max(0, len(history.slow_ranks) - MOST_SLOW),
        given=given,
        defaults=defaults,
        made_by=made_by,
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("raylaunch.cli.html_report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {
        "time": duration,
        "cell": lambda text: capped(str(text), _MOST_CELL),
        "clock": _clock,
        "code": _code,
        "count": count,
        "rate": rate_text,
        "ranks": spans,
        "value": _value,
        "percent": lambda part: f"{part:.1%}" if 0 < part < 0.1 else f"{part:.0%}",  # noqa: PLR2004
    }
    return environment.get_template(_TEMPLATE)


def _shown(value: Any) -> Any:
    """Make control characters visible, and shorten what is too long, in every text that the template prints."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return printable(capped(value, _MOST_TEXT), several_lines=True)
    return value


def _code(text: str) -> Markup:
    """Return a text in which the parts between backticks are code."""
    parts = map(escape, _shown(text).split("`"))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else part for index, part in enumerate(parts)
    )


def _value(value: Any) -> str:
    """Return a setting as JSON has it, which YAML reads too."""
    return capped(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), _MOST_CELL)


def _clock(began: str, at: float = 0.0) -> str:
    """Return a time of day, with its offset from UTC; "" if it is not known. `began`: ISO 8601."""
    try:
        then = datetime.fromisoformat(began) + timedelta(seconds=at)
    except (ValueError, OverflowError):
        return ""
    return then.isoformat(sep=" ", timespec="seconds")


_COMPILED = _template()
