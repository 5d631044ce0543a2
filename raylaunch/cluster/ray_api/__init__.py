"""What is asked of Ray itself: placement groups, drains, the head, and errors as text. Used by RayFleet.

Read `placement_groups` first: it turns the allocator's slots into Ray's placement groups. `gcs_monitor` asks the head
once a second, in threads of its own, whether it is there and which hosts are drained, and reports what changed by
calling back; `actor_errors` turns the error of a dead agent into one line.
"""
