"""Job files and settings: everything between a parsed command line and a valid `Job`.

Read `load` first. It takes settings from the environment and the flags, from the job file (`job_file`), from
`KEY=VALUE` arguments, or from keyword arguments of `raylaunch.launch`, puts them into an OmegaConf config that checks
types (`schema`), and makes the `Job`. All mistakes are reported together: `type_errors` writes the
messages for those that PyYAML and OmegaConf find, and `core.job.validation` finds the others.
"""
