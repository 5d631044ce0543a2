"""Gives one rank the terminal of the command: `--debug` and `--pty`.

Read `agent` first: it has the pty of the worker. `driver` passes on what a person types. What the worker writes is
output as any other.
"""
