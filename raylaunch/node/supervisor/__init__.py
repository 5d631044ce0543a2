"""The supervisor: the agent's side of a node's fork server. Its process imports no torch and never blocks.

Start with `supervisor`: `Supervisor.handle` takes the driver's orders and sends messages to the fork server by way of
`forkserver_client`; `Supervisor.poll` receives its messages, reads what workers write on the shared page and into the
files of their stacks (`stack_dumps`), and returns node events. `attempt_state` is what the supervisor knows of the
present attempt, and `process_failure` collects what is known of a worker that died.
"""
