"""Monitoring: from heartbeats of workers to reports of progress, steps for checkpoints, and hangs.

Read `heartbeat` (what nodes report each second) and `rank_progress` (what is known from it) first. `progress_report`
makes `Progressed` events, `checkpoint_step` proposes the step at which all workers save, `hang_detector` suspects hangs
by silence. For a suspected hang, `hang_policy` decides from stack samples whether it is one, and `hang_cause` finds the
ranks that the others wait for.
"""
