"""Bytes on disk: what files hold, where, and whether they are whole."""
