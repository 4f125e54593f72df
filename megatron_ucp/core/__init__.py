"""Pure arithmetic on layouts and plans: standard library only, no I/O."""
