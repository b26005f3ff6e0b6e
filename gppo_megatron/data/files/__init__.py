"""Problems with known answers from parquet, JSON lines and JSON: read, checked row by row, and written as prompts."""
