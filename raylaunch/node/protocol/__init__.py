"""What crosses between driver, supervisor and fork server: dataclasses, and the ways in which they travel.

Start with `messages`: the driver's orders and the node's events, and what the supervisor and its fork server send each
other over a socket pair (`wire`). `node_spec` is what workers are started from. The lease of a
node is on its shared page (`lease_page`); what the fork server imports ahead is an `import_manifest`.
"""
