"""Activation checkpointing for code that is captured by hand: recompute in the backward what the forward dropped."""
