"""Files of rules: what a checkpoint says of its layouts, a first draft, and a file against it."""
