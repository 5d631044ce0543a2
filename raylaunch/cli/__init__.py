"""The command line and the Python API: what the user types, and everything the user reads.

Read `main` first. It parses the command line (`args`), makes a `Job` (`config`) and runs it in this process
(`run_once`). `output` prints the lines of the run and its report. `runs` has the commands on runs that go on or have
ended, such as `raylaunch ps`. `api` and `spawn` are `raylaunch.launch` and `raylaunch.spawn`, which run functions in
the same way.
"""
