"""Job files and settings: everything between a parsed command line and a valid `Job`.

Read `load` first. It takes settings from the environment and the flags (`flag_settings`), from the job file
(`job_file`) and from `KEY=VALUE` arguments, puts them into an OmegaConf config that checks types (`schema`), and makes
the `Job`. `schema` also refuses references that stand for too much. All mistakes are reported together: `type_errors`
writes the messages for those that PyYAML and OmegaConf find, and `core.job.validation` finds the others.
`python_settings` makes the job of `raylaunch.launch`.
"""
