"""The self-check: a program that every worker runs in place of the script (`raylaunch check`, or under torchrun).

It tries each operation of torch.distributed between all ranks. Read `program` first: it runs the table of `checks` in
order, and brings the outcomes of all ranks to rank 0 through the launch's store; `findings` turns them, and what
`versions` read, into rows and a table.
"""
