"""Reads the workers' log files as they grow, and turns them into the output that a person sees.

Workers write their log files themselves. `tail` follows the files and returns new bytes with their rank: it splits them
into lines, puts the rank's prefix before each, and copies lines that a filter matches into a file of their own. The
agent's log shipper sends the result to the driver. `log_times` notes when files grew, and `log_files` reads parts of
them for `raylaunch logs`.
"""
