"""The operations: resume, convert, plan, verify, diff, rules. Joins families, formats and plans."""
