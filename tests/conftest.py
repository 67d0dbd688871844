"""Puts tests/ on the path, so that rank functions of one test file can be imported by the processes it starts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
