"""HF <-> Megatron parameter tables, one per model family, as pure tensor maps."""
