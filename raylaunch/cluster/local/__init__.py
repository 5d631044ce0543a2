"""The machine itself as a cluster of one node, without Ray.

Read `local_machine` first: it tells whether there is a cluster to connect to, and this machine's resources for a job.
`gpus` counts the GPUs, and `slots` divides them among the agents of a `LocalFleet`. `file_writer` writes files in a
thread.
"""
