"""Ranks inside a program that uses Ray itself, such as one for reinforcement learning.

It is built on the other packages, and none of them knows it. The caller owns the connection to Ray and the placement
group; nothing here connects by itself, changes a setting of Ray, or removes what it has not made.

Read `group` first. A `WorkerGroup` launches `rank.serving`, which makes an object in each rank and connects to the
caller. `dispatcher` sends calls over these `lines`, one after the other; the driver of the run, in another thread,
restarts ranks that die, and the new ones connect. `lending` brings objects of Ray's to ranks, by an actor on each node,
the `object_lender`. `rank_env` is for callers that start their ranks themselves.
"""
