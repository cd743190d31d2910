"""What is done to a graph before its partitions are compiled, one pass a module."""
