"""What other processes may ask of a run while it lasts: its status, its logs, its end.

Read `control_messages` first: it has what can be asked, and what is answered. The driver's process has a
`control_server`, which admits connections that begin with the secret of the run, and gives each of them a thread. What
they ask is answered by `run_control`; what changes the run goes through the driver's inbox as an event. Commands such
as `raylaunch stop` ask by a `control_client`. `control_frames` is how messages travel. `cluster_registry` keeps in the
cluster where each run's server listens, so that commands on other machines find it.
"""
