"""The fork server: one process per node that has torch imported and forks the workers of every attempt.

Start with `server`: its `ForkServer` reads orders from the supervisor's socket, forks workers into its `WorkerTable`,
and sends back what becomes of them (`node/protocol/forkserver_messages`). Its parent is the `subreaper`, which outlives
it; both watch the `lifeline` to the agent. Its other children are the stores (`store`), the `file_timer` and the zygote
(`node/preload`).
"""
