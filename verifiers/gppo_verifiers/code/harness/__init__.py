"""Scripts that run inside a sandbox, under the system's Python with the standard library alone.

Each comes with `gppo_values` beside it in the work directory, which is also imported here, outside.
"""
