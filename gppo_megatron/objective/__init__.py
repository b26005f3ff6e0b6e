"""The GPPO objective as pure functions of per-token tensors (torch alone; `presets` not even that)."""
