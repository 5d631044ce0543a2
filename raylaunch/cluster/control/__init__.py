"""What may be asked of a run while it lasts: its status, its logs, its end.

Read `control_messages` first: it has what can be asked, and what is answered. Each request is carried out by
`run_control`, in the thread of whoever asks; what changes the run goes through the driver's inbox. The driver's process
serves it over HTTP by a `control_server`, to those who know the secret of the run. Commands such as `raylaunch stop`
ask by a `control_client`, and `Handle` asks `run_control` itself. `cluster_registry` keeps in the cluster where each
run's server listens, so that commands on other machines find it.
"""
