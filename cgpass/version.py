"""The version of cgpass."""

from typing import Final

VERSION: Final = "0.1.0"
