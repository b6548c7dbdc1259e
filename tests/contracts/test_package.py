"""What a user gets: the wheel, its entry points, and what importing it loads."""

import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = folder.glob("*.whl")
    return path


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def _run(code: str, python_path: Path | None = None) -> str:
    environment = {"PATH": "/usr/bin:/bin"}
    if python_path is not None:
        environment["PYTHONPATH"] = str(python_path)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_wheel_requires_neither_vllm_nor_torch(wheel: Path) -> None:
    requirements = " ".join(_metadata(wheel).get_all("Requires-Dist") or [])
    assert "pydantic" in requirements
    assert "vllm" not in requirements
    assert "torch" not in requirements


def test_the_wheel_carries_the_recall_model_and_the_catalogue_and_stays_small(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        assert f"vllm_kvpp/demo/recall/{file}" in names
    catalogue = {path.name for path in (ROOT / "src/vllm_kvpp/planner/models").glob("*.json")}
    assert catalogue == {name.rpartition("/")[2] for name in names if name.startswith("vllm_kvpp/planner/models/")}
    assert len(catalogue) >= 16
    assert wheel.stat().st_size < 9 * 1024 * 1024


def test_a_wheel_installed_beside_vllm_attaches_to_the_platform_when_vllm_loads_its_plugins(
    wheel: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), str(wheel)]
    subprocess.run(command, check=True, timeout=120)
    code = (
        "from vllm.plugins import load_general_plugins; from vllm.platforms import current_platform; "
        "load_general_plugins(); import vllm_kvpp; "
        "print(vllm_kvpp.__file__); "
        "print(type(current_platform).check_and_update_config.__func__._kvpp_is_wrapped)"
    )
    file, is_wrapped = _run(code, tmp_path).splitlines()[-2:]
    assert Path(file).is_relative_to(tmp_path)
    assert is_wrapped == "True"


@pytest.mark.parametrize(
    "module", ["vllm_kvpp", "vllm_kvpp.config", "vllm_kvpp.plan", "vllm_kvpp.planner.command", "vllm_kvpp.cli"]
)
def test_planning_and_the_command_line_load_neither_torch_nor_vllm(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torch', 'vllm', 'numpy') if name in sys.modules])"
    assert _run(code) == "[]"


def test_importing_the_plugin_module_loads_no_vllm() -> None:
    code = "import sys, vllm_kvpp.vllm_seam.plugin; print('vllm' in sys.modules, 'torch' in sys.modules)"
    assert _run(code) == "False False"
