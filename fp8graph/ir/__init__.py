"""The graph: its ops, its nodes, and plain data about them."""
