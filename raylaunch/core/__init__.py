"""The pure core: it decides what to do and does nothing itself. No Ray, torch, clock, I/O or logging.

Events come in and actions go out; time is a number that events carry. Read `machine` first: it decides. `job` is what
the user asked for, `placement` computes nodes and ranks from it, `failures` finds root causes, `monitoring` turns
heartbeats into progress and hangs, and `record` keeps the journal, from which every decision can be replayed.

Terms: a *node* is an agent with its workers, a *host* the machine (Ray node) it runs on. The *world* is the set of all
workers of one *attempt* (torchelastic: worker group); its *roster* is the list of its nodes in rank order.
"""
