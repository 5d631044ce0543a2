"""The job: what the user asked for, and checks and texts that need nothing else.

Read `job` first: its dataclasses are the schema of job files, overrides and the Python API. `validation` finds what
is wrong with a job whose values have the right types. `node_rules` applies the section `nodes` on a node, `outputs`
decides what the terminal shows of each rank. `secrets` recognises secrets by their names, and `redaction` removes
them from everything that is written down.
"""
