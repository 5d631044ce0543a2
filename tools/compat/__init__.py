"""raylaunch with other versions of Python, Ray, torch and omegaconf than those that it is developed with.

`python -m tools.compat [--only WORDS] [--keep]` makes an environment for each combination of versions, one after
another, runs in it what `checks.py` lists, and removes it. It writes what came of it to `results.json`, from which
`python -m tools.docs` makes the tables of README.md and docs/compatibility.md.
"""
