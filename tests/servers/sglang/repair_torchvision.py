"""Let PyPI's torchvision, built for CUDA, be imported beside a CPU build of torch.

Its compiled operators do not load there, and two places register shapes for them without asking whether they did.
"""

import importlib.util
import re
from pathlib import Path


def main() -> None:
    found = importlib.util.find_spec("torchvision")
    assert found is not None
    assert found.origin is not None
    file = Path(found.origin).with_name("_meta_registrations.py")
    text = file.read_text(encoding="utf-8")
    pattern = re.compile(r"^@torch\.library\.register_fake\((?P<name>[^)]*)\)$", re.MULTILINE)
    guarded = (
        r"@(torch.library.register_fake(\g<name>) if torchvision.extension._has_ops() else (lambda function: function))"
    )
    repaired, count = pattern.subn(guarded, text)
    if count:
        file.write_text(repaired, encoding="utf-8")
    elif "register_fake" in text and "_has_ops() else" not in text:
        raise SystemExit(f"{file}: the registrations are not where they were; repair this script")


main()
