"""The operations: load, verify, diff. Joins families, formats and plans."""
