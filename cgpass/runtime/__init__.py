"""Capture and replay. Knows nothing of FX."""
