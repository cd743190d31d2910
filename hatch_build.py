"""Project URLs in the metadata of what is built: those of the public place that the checkout was cloned from."""

import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PUBLIC = re.compile(
    r"(?:https://(?:[^@/]+@)?|git@|ssh://git@)(github\.com|gitlab\.com|codeberg\.org)[/:](.+?)(?:\.git)?/?"
)


class ProjectURLs(MetadataHookInterface):
    """Fills `project.urls`. What is built from a source distribution has those of the distribution."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add them, if the project's folder is a clone of a public place: of others no name or password is told."""
        metadata["urls"] = {}
        if not (Path(self.root) / ".git").exists():
            return
        command = ["git", "-C", self.root, "remote", "get-url", "origin"]
        try:
            asked = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:  # there is no git here
            return
        found = _PUBLIC.fullmatch(asked.stdout.strip())
        if found is not None:
            source = f"https://{found[1]}/{found[2]}"
            metadata["urls"] = {"Source": source, "Issues": f"{source}/issues"}
