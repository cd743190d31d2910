"""Says who speaks where nobody set up logging: Python then prints warnings bare, without the logger's name."""

import logging
import sys


class LastResort(logging.Handler):
    """Prints warnings as `logging.lastResort` would, with our name before them; silent beside any other handler."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record that nobody else takes."""
        if sys.stderr is None or logging.lastResort is None or self._has_company(record.name):
            return
        text = self.format(record)
        head = "" if text.startswith("cgpass") else "cgpass: "
        sys.stderr.write(f"{head}{text}\n")

    def _has_company(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None and all(handler is self for handler in logger.handlers):
            logger = logger.parent if logger.propagate else None
        return logger is not None


def install() -> None:
    """Have warnings of `cgpass.*` carry our name; once."""
    log = logging.getLogger("cgpass")
    if not any(isinstance(handler, LastResort) for handler in log.handlers):
        log.addHandler(LastResort(logging.WARNING))
