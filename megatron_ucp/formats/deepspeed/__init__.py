"""DeepSpeed's files: native ones and universal folders, read and written, and what only DeepSpeed
knows."""
