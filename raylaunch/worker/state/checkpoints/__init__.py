"""Commits of `State` and `torch.distributed.checkpoint` (DCP): other world sizes, and checkpoints on disk.

`dcp_parts` shows the parts of a commit to DCP, whose planner puts shards together; read it first. `resharded` is what
`State.restore` reads from for a world of another size, and from disk. `checkpoint_writer` writes a commit to disk, into
a `durable_folder`: in a `checkpoint_process` of the node or, `without_agent`, in a thread of the worker. All but the
folder and the process import torch.
"""
