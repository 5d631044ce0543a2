"""System calls and files of Linux that Python's standard library does not wrap, one subject per module.

Read `processes` first: child processes, how they are forked and how they end. `procfs` reads /proc, `cgroups` finds the
control groups of a process, `limits` names the limit that an error met, `interfaces` finds IP addresses,
`working_folder` the folder of this process, `inotify` and `timerfd` give file descriptors to wait for, `scratch` keeps
output that is only to be shown, `ram_folder` files in memory, and `fd_store` descriptors that outlive the agent; `dns`
stops torch from looking up names. Nothing here knows of runs or attempts.
"""
