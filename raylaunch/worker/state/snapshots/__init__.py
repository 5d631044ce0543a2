"""What is in a commit: objects of a script as tensors and a pickle without them, and back.

`snapshot` takes them, and `snapshot_cache` does so after each step; `restored` reads them from buffers. `random_states`
are one of the items. None of them imports torch, which is there if the objects have tensors.
"""
