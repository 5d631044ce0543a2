"""Survivors: workers that stay when another one dies, and take part in the next attempt as the processes they are.

`elastic_function` is the decorator `elastic`; read it first. `survivor_link` is the connection to the supervisor, which
says when the next attempt begins. Then `broken_collectives` ends what this process waits for, `light_commits` writes
what the ranks restore, and `survivor` makes of it a worker of that attempt. Nothing here imports torch before the
script has.
"""
