"""The features of each PostgreSQL version that Walmere uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from walmere.errors import NotConfigured

OLDEST: Final = 14
NEWEST_TESTED: Final = 18


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features of one server."""

    version: int  # server_version_num

    @property
    def major(self) -> int:
        """The major version: 18 for 180006."""
        return self.version // 10_000

    @property
    def protocol(self) -> int:
        """The highest version of the logical replication protocol: 2 has streaming, 3 two-phase, 4 parallel."""
        return {14: 2, 15: 3}.get(self.major, 4)

    @property
    def streaming(self) -> str:
        """The value of the option `streaming`. With `parallel`, a Stream Abort also has its LSN and time."""
        return "parallel" if self.major >= 16 else "on"

    @property
    def slot_options(self) -> bool:
        """CREATE_REPLICATION_SLOT takes a list of options in parentheses."""
        return self.major >= 15

    @property
    def decoding_on_standby(self) -> bool:
        """A standby can be the publisher."""
        return self.major >= 16

    def require(self, option: str) -> None:
        """Refuse an option of the configuration that this server does not have."""
        since = {"two_phase": 15, "origin": 16, "failover": 17}[option]
        if self.major < since:
            raise NotConfigured(
                "preparing to receive",
                f"source.{option} needs PostgreSQL {since} or later, the source has {self.major}",
                f"remove {option} from [source], or upgrade the source",
            )
