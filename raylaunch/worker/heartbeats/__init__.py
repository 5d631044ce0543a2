"""How a worker tells its node that it is alive, at which step it is, and whether it has saved.

Each worker has one slot of a page of memory that it shares with its agent (`shared_page`; read this first). Its
`heartbeat_writer` writes it on each optimizer step, of which it learns by `import_hook` when the script imports torch,
and on each call of `raylaunch.worker`. The supervisor reads the slots once a second.
"""
