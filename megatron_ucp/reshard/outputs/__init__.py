"""Formats that can be written: what each of them says of a folder, before it is there."""
