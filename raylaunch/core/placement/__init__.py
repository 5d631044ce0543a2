"""Placement: which nodes run how many workers, and what each worker is told.

Read `environment` first: it assigns ranks to the members of a world, decides which variables reach the workers, and
makes torchrun's variables. `plan` computes from a job and the cluster's nodes what to reserve, with ranks and the
reasons why nodes are skipped, for `raylaunch plan` and the head of a run.
"""
