"""Placement: which nodes run how many workers, and which worker gets which rank.

Read `ranks` first: it assigns ranks to the members of a world and makes torchrun's environment variables. `packing`
computes from a job and the cluster's nodes what to reserve; `plan` adds ranks and the reasons why nodes are skipped,
for `raylaunch plan` and the head of a run. `environment` decides which variables reach the workers.
"""
