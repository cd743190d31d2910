"""What was captured of a function, what was not and why, as an object, as text and as a page."""
