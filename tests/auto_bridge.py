"""A stand-in for Megatron-Bridge's `AutoBridge`, with its signatures; the builtin converter does the work."""

import json
import shutil
from pathlib import Path
from typing import Any

RUN_CONFIG = """\
model:
  _target_: megatron.bridge.models.qwen.qwen_provider.Qwen3ModelProvider
  activation_func: {_target_: torch.nn.functional.silu, _call_: false}
"""


class AutoBridge:
    def __init__(self, hf_pretrained: Any) -> None:
        self._model = Path(hf_pretrained)

    @classmethod
    def can_handle(cls, path: str | Path, trust_remote_code: bool = False) -> bool:
        """Downloads nothing, runs nothing of the folder."""
        assert not trust_remote_code
        return json.loads((Path(path) / "config.json").read_text())["model_type"] == "qwen3"

    @classmethod
    def from_hf_pretrained(cls, path: str | Path, **kwargs: Any) -> "AutoBridge":
        assert not kwargs
        return cls(path)

    @classmethod
    def import_ckpt(cls, hf_model_id: str | Path, megatron_path: str | Path, **kwargs: Any) -> None:
        """Into `iter_0000000`, as the real one does."""
        from checkpoints_tools.convert import Options, hf_to_megatron

        assert not kwargs
        root = Path(megatron_path)
        hf_to_megatron(Path(hf_model_id), root / "made", Options(), lambda _: None)
        shutil.rmtree(root / "made" / "hf")
        (root / "made" / "manifest.json").unlink()
        (root / "made").rename(root / "iter_0000000")
        (root / "iter_0000000" / "run_config.yaml").write_text(RUN_CONFIG)
        (root / "latest_checkpointed_iteration.txt").write_text("0")

    def export_ckpt(
        self,
        megatron_path: str | Path,
        hf_path: str | Path,
        show_progress: bool = True,
        strict: bool = False,
        source_path: str | Path | None = None,
    ) -> None:
        from checkpoints_tools.convert import Options, megatron_to_hf

        assert strict
        made = Path(hf_path) / "made"
        megatron_to_hf(Path(megatron_path) / "iter_0000000", made, Options(config=self._model), lambda _: None)
        (made / "manifest.json").unlink()
        for file in list(made.iterdir()):
            file.rename(Path(hf_path) / file.name)
        made.rmdir()
