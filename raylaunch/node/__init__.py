"""One machine with many processes: the supervisor, the fork server, workers, stores and log files. It knows no Ray.

Start with `protocol`, then `supervisor` (in the agent's process, without torch) and `forkserver` (its own process).
An order goes from the supervisor over a socket to the fork server, which forks workers; events come back the same way.
`preload` is what the fork server imports ahead, `linux` wraps the kernel's interfaces, `logs` reads workers' output.
"""
