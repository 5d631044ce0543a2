"""Failures of workers: what they mean, and what a person may do about them.

Read `failure` first: a `Failure` is one worker that did not end with exit code 0, and `root_cause` finds the one that
the others followed from. `error_file` reads and writes the files of torchelastic's `@record`, the source of a
failure's `WorkerError`. `stacks` groups the stacks of workers that hang, and `stack_notes` says what else is known of
them. `hints` turns both into advice.
"""
