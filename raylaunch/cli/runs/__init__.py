"""The commands on runs, such as `raylaunch ps`.

Read `commands` first: it has a function for each subcommand. `known_runs` says which runs there are and which one a
person means; it is the one place that knows where runs are found. `run_reader` asks the driver while the
run lasts, and else has `FolderReader` read the run folder. `run_summary` makes of both what is shown, and `run_tables`
shows it. `follow_logs` prints what `worker_logs` reads. `run_requests` has the driver change
the run, as `raylaunch stop` does. `show_report` has `raylaunch.cli.html_report` write the report.
"""
