"""Fork servers and writers of checkpoints that find torch imported, for jobs with `RAYLAUNCH_TEST_WARM_TORCH`: each would take 3 s of CPU for it.

That variable names a program that is started in place of Python: `WarmPython.executable` of one with torch. Agents
that are forked from a process which has imported this module, and drivers without Ray that have, look for it.
"""

import subprocess
import types

from raylaunch.node.state import checkpoint_writes
from raylaunch.node.supervisor import forkserver_client


def popen(command, *, env, **options):
    return subprocess.Popen([env.get("RAYLAUNCH_TEST_WARM_TORCH", command[0]), *command[1:]], env=env, **options)


forkserver_client.subprocess = checkpoint_writes.subprocess = types.SimpleNamespace(
    Popen=popen, **{name: value for name, value in vars(subprocess).items() if name != "Popen"}
)
