"""Finds workers that make no steps any more, and the ranks that the others wait for: `hang_timeout`.

`driver` follows the heartbeats of an attempt and collects the stacks of its workers. What it decides by is in
`raylaunch/core/monitoring`: `hang_detector` suspects a hang by silence, `hang_policy` judges what the workers do, and
`hang_cause` finds the ranks.
"""
