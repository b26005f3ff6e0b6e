"""Where the program stands in an answer."""

import time

import pytest
from gppo_verifiers.code.extract import last_block

PYTHON = ("python", "py")


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("Here:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```py\na\n```\n```python\nb\n```", "b\n"),
        ("```python\na\n```\nIt prints\n```\n3\n```", "a\n"),
        ("```python\na\n```\n```text\n3\n```", "a\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("```Python\na\n```", "a\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("1. So\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ("<think>```python\na\n```</think>```python\nb\n```", "b\n"),
        ("```python\r\na\r\n```\r\n", "a\r\n"),
        ("<think>```python\na\n```</think> I do not know.", None),
        ("```python\na\n```\n```python\nb", None),  # cut off
        ("print(1)", None),
        ("```cpp\nint main() {}\n```", None),
        ("", None),
    ],
)
def test_the_last_block_that_may_be_the_program(text, program):
    assert last_block(text, PYTHON) == program


@pytest.mark.parametrize(
    "line",
    ["```" + "a" * 200_000 + "`", "```" + " " * 200_000 + "`", "~~~" + " a" * 100_000 + "`", "`" * 200_000 + "a`"],
    ids=["word", "blanks", "words", "ticks"],
)
def test_a_long_line_is_read_in_linear_time(line):
    began = time.process_time()
    assert last_block(line, PYTHON) is None
    assert time.process_time() - began < 5
