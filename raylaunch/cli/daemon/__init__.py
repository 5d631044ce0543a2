"""`keep_warm`: a daemon that runs jobs for `raylaunch` commands one after another, as Gradle's and dmypy's daemons do.

Read `client` first: the command finds or starts a daemon, sends it the run (`daemon_messages`) and forwards signals
until the run ends. `daemon` is the process, which gives the run the command's folder, environment, streams and signals;
its `listener` thread accepts connections while the main thread runs the job. `socket_dir` is where daemons listen,
`fingerprint` says which daemon may serve which command, and `status` prints `raylaunch ps`.
"""
