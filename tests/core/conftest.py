"""Put this folder on sys.path, so that its tests can import `machine_helpers`, `simulation` and `replay_files`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
