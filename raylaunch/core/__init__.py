"""What to do next. Nothing in this room acts: no Ray, no torch, no clock, no I/O, no logging.

Events come in, actions go out, and time is a number that events carry.
"""
