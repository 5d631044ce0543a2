"""What is known of a worker besides its stack, as people see it: `StackGroup.note`."""

from __future__ import annotations

STOPPED = "stopped by a signal"
IN_THE_KERNEL = "in the kernel, where nothing interrupts it"
RUNNING_ON = "running, and did not answer"
NO_ANSWER = "did not answer"
FILE_CLOSED = "has closed the file for its stacks"
CHILD_STOPPED = "a process it started is stopped by a signal"
AFTER_END = "at the end of its script, which it does not get past"
"""Its main thread has no frame of Python any more: it frees objects, or waits for threads that do."""
