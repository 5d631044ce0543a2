"""The command line: the table of flags, the parser, `--help`, and error messages that mark the mistake.

Read `flags` first: one row for each flag, with the setting that it sets. `parser` turns the arguments and the `PET_*`
variables into a `CommandLine`, in which each value carries its `SourceSpan` (`diagnostics`); a mistake anywhere in the
command line, the job file or the environment becomes a `Finding`, drawn under the text that causes it. `usage` prints
the table. What the flags mean as settings is decided in `cli.config`.
"""
