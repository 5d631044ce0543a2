"""What a run is doing, and what happened in it over time, computed from its journal alone.

Read `run_status` first: `StatusBuilder` takes the entries of a journal one after the other, for whoever asks how the
run is. `run_history` does so for `raylaunch report`. Both give each to `time_per_state`, with `attempt_times`, which
notes when an attempt did what; `step_rates` compares the ranks.
"""
