"""Large blocks that were freed are the system's again, also where they lie below smaller ones that are kept."""

import os
import subprocess
import sys

from lockstep.host_memory import return_large_blocks

CHECK = """
import os, sys, torch
from lockstep.host_memory import return_large_blocks

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20

if sys.argv[1] == "set":
    assert return_large_blocks()
del_first = torch.ones(30 << 18)            # 30 MiB, freed: glibc then maps nothing smaller any more
del del_first
before = resident()
for _ in range(20):
    large, small = [torch.ones(20 << 18) for _ in range(10)], torch.ones(64)   # 200 MiB, and something behind it
    kept = [small]
    tail = torch.ones(16 << 10)
    del large
print(resident() - before)
"""


def grown(how: str) -> int:
    """MiB that the process has grown by."""
    env = {name: value for name, value in os.environ.items() if name != "MALLOC_MMAP_THRESHOLD_"}
    done = subprocess.run([sys.executable, "-c", CHECK, how], capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_freed_blocks_go_back():
    if not sys.platform.startswith("linux"):
        assert not return_large_blocks()
        return
    assert grown("set") < 30 < grown("as it is")


def test_a_setting_of_the_users_own_is_left_alone(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")
    assert not return_large_blocks()
