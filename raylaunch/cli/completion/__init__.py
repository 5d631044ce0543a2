"""Completion of the command line in a shell: `raylaunch completion bash`.

The scripts of all shells, in `shell_scripts`, ask `raylaunch completion --words WORDS...` what may come next, and
`candidates` answers. So each flag, setting and run is known in one place, also after an update.
"""
