"""The documentation: its generated tables, its links, and the names of code in it.

`python -m tools.docs` writes the generated tables anew. `python -m tools.docs.recording` records the run that the README
shows.
"""
