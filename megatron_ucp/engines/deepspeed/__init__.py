"""Live DeepSpeed engines."""
