"""From a forked process, or a fresh interpreter, to the first line of the user's code, and from its end to a report.

Read `boot` first: it takes a `WorkerSpec` (`spec`), sets up the process (with `process_setup`, `numa`, `stack_signal`,
`tcpstore_patch`), calls the user's code (`entry`) and writes a report for the fork server. Meanwhile
`import_recorder` tells the fork server what the script imports, and `staleness` whether that has changed on disk.
"""
