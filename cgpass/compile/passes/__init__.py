"""Rewrites of a graph before its partitions are compiled, one pass a module."""
