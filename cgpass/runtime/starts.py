"""When every recording of an owner is dropped to be made anew: asked for, waited for, and how often."""

MAX_STARTS = 8
"""Times that all recordings are dropped to be made anew."""
PATIENCE = 4
"""Steps that wait for nothing to be held, and as many more in which what is held is moved."""


class Starts:
    """Whether all recordings are to be made anew, and how long that may wait."""

    def __init__(self) -> None:
        """Nobody asked yet."""
        self.wanted = False
        """Whether `Owner.start_over_if_idle` is to be called before the next replay."""
        self._begun = 0
        self._refusals = 0
        self._patience = PATIENCE
        """Calls in `PATIENCE` steps, when it was asked for."""
        self._settles = False
        """Whether it is asked for by what comes to an end by itself."""

    def ask(self, num_calls: int, *, patience: int | None = None, settles: bool = False) -> None:
        """Ask for one, as often as is allowed.

        Args:
            num_calls: Of one step.
            patience: Calls that wait for nothing to be held. The least that was asked for counts. By default as many as
                `PATIENCE` steps have: what a step saves is held until its end.
            settles: Whether that comes to an end by itself, so that it counts for nothing in `MAX_STARTS`.
        """
        if not self.wanted:
            self._patience = PATIENCE * max(1, num_calls)
        refusals = 0 if patience is None else self._patience - patience
        if self.wanted:
            self._refusals = max(self._refusals, refusals)
        elif settles or self.any_left:
            self.wanted, self._refusals = True, refusals
        self._settles |= settles and self.wanted

    @property
    def any_left(self) -> bool:
        """Whether one may be asked for that does not come to an end by itself."""
        return self._begun < MAX_STARTS

    def outlasts(self) -> bool:
        """Note that something is held; returns whether that was waited for long enough. In the end nobody wants it."""
        self._refusals += 1
        if self._refusals <= self._patience:
            return False
        self.wanted = self._refusals <= 2 * self._patience
        self._settles &= self.wanted
        return True

    def is_allowed(self) -> bool:
        """Whether one may be made now; else nobody wants it any more."""
        allowed = self.any_left or self._settles
        self.wanted &= allowed
        return allowed

    def begin(self) -> None:
        """Count one that was allowed; to be called before `forget`."""
        self._begun += not self._settles

    def forget(self) -> None:
        """Nobody asks any more."""
        self.wanted = self._settles = False

    def reset(self) -> None:
        """Begin as if there had been none."""
        self.forget()
        self._begun = self._refusals = 0
