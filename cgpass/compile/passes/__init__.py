"""Passes that rewrite a graph before its partitions are compiled, one pass a module."""
