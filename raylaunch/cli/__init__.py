"""The terminal: the command line, job files, and everything a person reads."""
