"""One YAML file -> frozen dataclasses, or one error that lists every problem."""
