"""One machine, many processes: the fork server, its supervisor, the store, the log files. No Ray, no torch imports.

What needs torch, the store, runs in a child of the fork server, where torch is loaded already.
"""
