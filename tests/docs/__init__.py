"""README and docs are run: every command, every printed output, every link."""
