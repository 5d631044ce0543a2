"""How a worker tells its node that it is alive, at which step it is, and whether it has saved.

Each worker has one slot of a page of memory that it shares with its agent (`shared_page`; read this first). The owner
of a slot (`slot_owner`) writes it through a `HeartbeatWriter`: on each optimizer step (`optimizers`, installed by
`import_hook` when the script imports torch), and on each call of `raylaunch.worker`. The supervisor reads the slots
once a second.
"""
