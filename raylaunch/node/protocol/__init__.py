"""What crosses between driver, supervisor and fork server: dataclasses, and the ways in which they travel.

Start with `orders` (driver to node) and `node_events` (node to driver). `messages` are those between the supervisor and
its fork server, which travel over a socket pair (`wire`). `node_spec` is what workers are started from. The lease of a
node is on its shared page (`lease_page`); what the fork server imports ahead is an `import_manifest`.
"""
