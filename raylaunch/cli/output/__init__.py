"""Everything that a run prints: lines while it runs, the report at its end, and torchelastic's events.

Read `console` first: it observes the run and prints a line for each change. `async_writer` writes these lines and the
workers' output in a thread, so that a slow terminal never blocks the driver; `progress_line` says what a restart cost
and how far training is. On a terminal `live_line` says what the run does at this moment, and `live_row` keeps that line
below the output. `report` makes the text for the result of a run and the table of `--plan`. `event_log` adds
torchelastic's events for `event_log_handler: console`.
"""
