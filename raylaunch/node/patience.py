"""How long the end of processes may take. Each of these is known to several programs, which must agree."""

END_SECONDS = 5.0
"""What a process has for ending all that it has started."""
WAIT_SECONDS = END_SECONDS + 1.0
"""How long others wait for one that does so, before they do without it."""
