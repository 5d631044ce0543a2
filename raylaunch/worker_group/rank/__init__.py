"""What runs in the ranks of a group, and the messages that go between them and the caller.

A rank connects to the caller's process, makes its object, and answers calls. Start with `serving`: its `RankServer` is
what `raylaunch.launch` would call a function. `messages` has what the two tell each other, and `frames` how they send
it. Neither Ray nor the caller's side is imported here.
"""
