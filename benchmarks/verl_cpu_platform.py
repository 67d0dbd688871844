"""verl's registry of accelerators in; the CPU added to it, out. verl imports this itself (VERL_USE_EXTERNAL_MODULES)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformCUDA):
    """Tensors stay where they are; there is no cache to empty, and no memory to report in verl's log lines."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> Any:
        return SimpleNamespace(
            empty_cache=lambda: None,
            memory_allocated=lambda: 0,
            memory_reserved=lambda: 0,
            mem_get_info=lambda: (0, 0),
        )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"
