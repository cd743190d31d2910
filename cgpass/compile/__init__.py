"""From an FX graph to a callable whose partitions are captured."""
