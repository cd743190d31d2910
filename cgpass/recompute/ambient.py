"""What else a computation depends on: autocast and the default device."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Autocast:
    """One device type's autocast settings."""

    device_type: str
    dtype: torch.dtype
    enabled: bool
    cache_enabled: bool

    @classmethod
    def now(cls, device_type: str) -> "Autocast":
        """The settings of this thread."""
        return cls(
            device_type,
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_enabled(device_type),
            torch.is_autocast_cache_enabled(),
        )

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """The settings for a block."""
        return torch.autocast(
            self.device_type,
            dtype=self.dtype,
            enabled=self.enabled,
            cache_enabled=self.cache_enabled,
        )


@dataclass(frozen=True)
class Ambient:
    """Thread-local settings, which a backward's thread doesn't share with its forward's."""

    autocasts: tuple[Autocast, ...]
    default_device: torch.device

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> "Ambient":
        """The settings of this thread that concern the CPU and `devices`."""
        types = dict.fromkeys(["cpu", *(device.type for device in devices)])
        return cls(
            tuple(Autocast.now(t) for t in types if torch.amp.is_autocast_available(t)),
            torch.get_default_device(),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The settings for a block, in whichever thread."""
        with contextlib.ExitStack() as stack:
            for autocast in self.autocasts:
                stack.enter_context(autocast.entered())
            if self.default_device != torch.get_default_device():
                stack.enter_context(self.default_device)
            yield
