"""The graphs that fp8graph rewrites: their ops, their nodes, and plain data about them."""
