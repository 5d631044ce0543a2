"""The commands on runs, such as `raylaunch ps`. On the machine of the driver, most need no answer of it.

Read `commands` first: it has a function for each subcommand. `known_runs` says which runs there are and which one a
person means; it is the one place that knows where runs are found. `run_reader` reads the journal of a run folder, also
while it grows; `live_reader` asks the driver instead, from other machines. `run_summary` makes of both what is shown,
and `run_tables` shows it. `follow_logs` prints what `worker_logs` reads. `run_requests` has the driver change
the run, as `raylaunch stop` does. `show_report` has `raylaunch.cli.html_report` write the report.
"""
