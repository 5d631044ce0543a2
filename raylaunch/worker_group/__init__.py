"""Ranks inside a program that uses Ray itself, such as one for reinforcement learning.

It is built on the other packages, and none of them knows it. The caller owns the connection to Ray and the placement
group; nothing here connects, changes a setting of Ray, or removes what it has not made. `rank_env` gives the caller's
own actors their ranks.
"""
