"""The script's `State` in memory of its node, which outlives the worker: commits after steps, and what restores them.

`elastic_state` is the API; read it first. A commit goes through `snapshot`, which turns the objects of the script into
tensors and one pickle without them, and into one of the rank's two `commit_buffer`s, memory that the node holds
(`buffer_client` gets it there). `shared_tensors` divides what is equal on all ranks. `commit_agreement` keeps ranks
from being two commits apart, `CommitSchedule` says after which steps to commit. Nothing here imports torch before the
script has.
"""
