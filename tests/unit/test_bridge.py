"""The provider over Megatron-Bridge, with a stand-in for it: what it is asked for, and what is refused around it.

The stand-in's signatures are compared with the real package's in `tests/external`.
"""

import importlib.metadata
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors.torch import load_file

from checkpoints_tools.bridge import BRIDGE, MegatronBridge
from checkpoints_tools.convert import Options
from gppo_megatron.checkpoint.manifest import verify
from gppo_megatron.errors import CheckpointError, ConfigError
from tests.auto_bridge import AutoBridge
from tests.unit.conversion import assert_same, hf_folder, save, silent, to_hf


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("megatron.bridge")
    module.AutoBridge = AutoBridge
    monkeypatch.setitem(sys.modules, "megatron.bridge", module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {BRIDGE: "0.3.1"}[name])


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return hf_folder(tmp_path / "hf")


@pytest.fixture
def megatron(hf: Path, tmp_path: Path) -> Path:
    MegatronBridge().hf_to_megatron(hf, tmp_path / "megatron", Options(), silent)
    return tmp_path / "megatron"


def test_a_model_goes_round_and_both_folders_are_published_whole(hf: Path, megatron: Path, tmp_path: Path) -> None:
    MegatronBridge().megatron_to_hf(megatron, tmp_path / "back", Options(config=hf), silent)
    verify(megatron)
    verify(tmp_path / "back")
    assert_same(hf, tmp_path / "back")
    assert_same(hf, to_hf(megatron / "iter_0000000", tmp_path / "ours", config=hf))


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.4.0")
    with pytest.raises(ConfigError, match=r"version 0\.4\.0 is installed; only 0\.3\.1 was looked at"):
        MegatronBridge()


def test_what_it_cannot_do_is_refused_before_it_starts(hf: Path, megatron: Path, tmp_path: Path) -> None:
    bridge = MegatronBridge()
    with pytest.raises(ConfigError, match="takes none of --dtype, --tensor, --processes and --dry-run"):
        bridge.hf_to_megatron(hf, tmp_path / "other", Options(processes=2), silent)
    with pytest.raises(CheckpointError, match="needs --config"):
        bridge.megatron_to_hf(megatron, tmp_path / "other", Options(), silent)
    with pytest.raises(CheckpointError, match="megatron exists already"):
        bridge.hf_to_megatron(hf, megatron, Options(), silent)
    (hf / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(ConfigError, match=r"does not know the model of .*hf"):
        bridge.hf_to_megatron(hf, tmp_path / "other", Options(), silent)
    (tmp_path / "empty").mkdir()
    options = Options(config=hf_folder(tmp_path / "known"))
    with pytest.raises(CheckpointError, match=r"empty: no distributed checkpoint"):
        bridge.megatron_to_hf(tmp_path / "empty", tmp_path / "other", options, silent)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "target",
    [
        "os.system", "megatron.core.utils.os.system", "subprocess.Popen", "megatron.bridge.utils.Popen",
        "megatron.core.transformer.TransformerConfig.__init__.__globals__.open",
    ],
)  # fmt: skip
def test_a_configuration_that_calls_anything_else_is_refused(
    target: str, hf: Path, megatron: Path, tmp_path: Path
) -> None:
    file = megatron / "iter_0000000" / "run_config.yaml"
    file.write_text(file.read_text() + f"  other: [{{_target_: {target}, _args_: [x]}}]\n")
    with pytest.raises(CheckpointError, match=rf"run_config\.yaml asks for {target}, which no configuration"):
        MegatronBridge().megatron_to_hf(megatron, tmp_path / "back", Options(config=hf), silent)


def test_a_hostile_pickle_is_refused_before_it_is_asked(hf: Path, megatron: Path, tmp_path: Path) -> None:
    (megatron / "iter_0000000" / ".metadata").write_bytes(pickle.dumps(print))
    with pytest.raises(CheckpointError, match=r"asks for builtins\.print"):
        MegatronBridge().megatron_to_hf(megatron, tmp_path / "back", Options(config=hf), silent)


def test_an_export_that_lacks_a_tensor_is_no_folder(
    hf: Path, megatron: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = AutoBridge.export_ckpt

    def loses_one(self: AutoBridge, megatron_path: str, hf_path: str, **options: Any) -> None:
        original(self, megatron_path, hf_path, **options)
        file = Path(hf_path) / "model.safetensors"
        tensors = load_file(file)
        del tensors["lm_head.weight"]
        save(file, tensors)

    monkeypatch.setattr(AutoBridge, "export_ckpt", loses_one)
    with pytest.raises(CheckpointError, match=r"wrote other tensors, or other shapes, than .*hf has: lm_head\.weight$"):
        MegatronBridge().megatron_to_hf(megatron, tmp_path / "back", Options(config=hf), silent)
    assert not (tmp_path / "back").exists()
