"""The fork server: one process per node that has torch imported and forks the workers of every attempt.

Start with `server`: its `ForkServer` reads orders from the supervisor's socket, forks workers into a `WorkerGroup`, and
sends back what becomes of them (`node/protocol/forkserver_messages`). Its parent is the `subreaper`, which outlives it.
Its other children are the stores (`store`), the `file_timer`, the zygote (`node/preload`), and a `hot_standby` that
takes its place when it dies. `lifecycle` begins and ends it, and
`promotion` is what a subreaper does.
"""
