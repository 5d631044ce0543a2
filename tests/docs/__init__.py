"""The documentation: its generated tables, its links, and the names of code in it.

`python -m tests.docs` writes the generated tables anew. `python -m tests.docs.recording` records the run that the README
shows.
"""
