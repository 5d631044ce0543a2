"""The machine itself as a cluster of one node, without Ray.

Read `local_machine` first: it tells whether there is a cluster to connect to, and this machine's resources for a job,
such as its GPUs. `scheduler` finds out when the scheduler will end the job. `file_writer` writes files in a thread.
"""
