"""Imports modules once, in a process that workers are forked from, instead of once in each worker.

The fork server imports the modules that `preload` lists before it serves (`initial`), if forks are safe after that
(`fork_safety`). With `preload: auto` it also imports what the script imports: `controller` (read this first) reads the
workers' import records and sends an `ImportManifest` through `zygote_client` to the `zygote`, a fork of the fork
server. The zygote imports the modules, refuses those whose import the script could notice, and forks the workers of the
next attempts.
"""
