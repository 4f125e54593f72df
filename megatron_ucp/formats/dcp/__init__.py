"""torch's distributed checkpoints of FSDP2 programs: Accelerate's, torchtitan's, a user's own."""
