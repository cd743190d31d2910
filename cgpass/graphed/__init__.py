"""`cgpass.make_graphed_callables`: modules and functions picked by hand, forward and backward as graphs."""
