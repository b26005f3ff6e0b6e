"""Did the demo learn? `python -m tests.e2e.demo_learned METRICS` fails unless held-out accuracy rose as promised."""

import json
import sys
from pathlib import Path

START_BELOW, END_ABOVE = 0.45, 0.80


def main(metrics: Path) -> int:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    held_out = [line["evaluation/accuracy"] for line in lines if "evaluation/accuracy" in line]
    seconds = sum(line.get("time/step", 0.0) + line.get("time/evaluation", 0.0) for line in lines)
    learned = held_out[0] < START_BELOW and held_out[-1] > END_ABOVE
    verdict = "1 passed, 0 failed" if learned else "0 passed, 1 failed"
    print(f"held-out accuracy {held_out[0]:.3f} -> {held_out[-1]:.3f} in {seconds:.0f} s of training")
    print(f"wanted: from below {START_BELOW} to above {END_ABOVE}")
    print(verdict)
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
