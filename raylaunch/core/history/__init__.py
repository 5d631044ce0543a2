"""What happened in a run over time, computed from its journal alone: for `raylaunch report`.

Read `run_history` first: `HistoryBuilder` takes the entries of a journal one after the other. It gives each to
`time_per_state`, with `attempt_times`, which notes when an attempt did what, and to `step_rates`.
"""
