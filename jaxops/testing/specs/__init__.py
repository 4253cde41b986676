"""The operators' declarations: one module an operator, each with a tuple `SPECS`."""
