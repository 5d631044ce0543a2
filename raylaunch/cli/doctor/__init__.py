"""`raylaunch doctor`: what is wrong with a job file, a cluster and its nodes, before anything is started.

Read `examination` first: it loads the job, has `node_report` collect facts on every node, and makes a `Surroundings` of
them. Each function of `node_checks` and `job_checks` looks at one thing in it and returns a `Diagnosis`, with its fix.
No worker is started and torch is not imported: what needs that is left to `raylaunch check`.
"""
