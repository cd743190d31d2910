"""Reports of what was captured, what was not and why: as an object, as text and as a page."""
