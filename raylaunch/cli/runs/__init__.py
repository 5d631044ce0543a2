"""The commands on runs: `raylaunch ps`, `raylaunch status` and so on, which need no answer of the run's driver.

Read `commands` first: it has a function for each subcommand. `known_runs` says which runs there are and which one a
person means; it is the one place that knows where runs are found. `run_reader` reads the journal of a run folder, also
while it grows. `run_summary` makes of both what is shown, `run_tables` shows it.
"""
