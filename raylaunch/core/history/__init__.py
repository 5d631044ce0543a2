"""What happened in a run over time, computed from its journal alone: for `raylaunch report`.

Read `run_history` first: `HistoryBuilder` takes the entries of a journal one after the other. It gives each to
`attempt_times`, which notes when an attempt did what, to `node_lives` and to `step_rates`. `time_per_state` and
`restart_cost` are computed from the times of all attempts.
"""
