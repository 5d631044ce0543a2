"""The commands on runs, such as `raylaunch ps`, which need no answer of the run's driver.

Read `commands` first: it has a function for each subcommand. `known_runs` says which runs there are and which one a
person means; it is the one place that knows where runs are found. `run_reader` reads the journal of a run folder, also
while it grows. `run_summary` makes of both what is shown, and `run_tables` shows it. `follow_logs` prints what
`worker_logs` reads of files. `stop_run` sends the driver a signal. `show_report` has `raylaunch.cli.html_report` write
the report.
"""
