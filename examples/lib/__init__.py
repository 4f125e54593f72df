"""What the examples share. None of it is needed in a script of yours."""
