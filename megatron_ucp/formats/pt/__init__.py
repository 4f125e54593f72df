"""The .pt container: a zip archive of records and a pickle that says what they are."""
