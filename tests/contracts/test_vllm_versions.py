"""The seam against the installed vLLM and against the source of the next release."""

import zipfile
from pathlib import Path

import pytest
import vllm_next
from vllm_process import VllmProcess

from vllm_kvpp.vllm_seam.symbols import PROVEN_VERSIONS

ROOT = Path(__file__).parents[2]


def test_every_symbol_of_the_seam_is_there_with_its_shape(vllm: VllmProcess) -> None:
    faults = vllm.ask("find_seam_faults")

    if faults:
        pytest.fail(
            f"vLLM {vllm.name} breaks {len(faults)} symbol(s) of the seam:\n" + "\n".join(faults), pytrace=False
        )


def test_the_next_release_is_checked_from_its_own_source(next_vllm: VllmProcess) -> None:
    release = next_vllm.ask("describe_release")

    assert Path(release["file"]).is_relative_to(vllm_next.FOLDER)
    assert release["version"] == vllm_next.VERSION


def test_the_installed_release_is_checked_where_it_is_installed(installed_vllm: VllmProcess) -> None:
    release = installed_vllm.ask("describe_release")

    assert "site-packages" in Path(release["file"]).parts
    assert release["version"] in PROVEN_VERSIONS


def test_a_release_that_was_only_read_is_not_called_proven() -> None:
    assert vllm_next.VERSION not in PROVEN_VERSIONS


def test_a_symbol_that_the_next_release_removed_is_reported_by_name(
    installed_vllm: VllmProcess, next_vllm: VllmProcess
) -> None:
    removed = "vllm.v1.spec_decode.medusa:MedusaProposer"

    assert installed_vllm.ask("check_symbol", path=removed) is None
    message = next_vllm.ask("check_symbol", path=removed)
    assert f"cannot attach to vLLM {vllm_next.VERSION}" in message
    assert f"\n  - {removed} is missing (" in message


def test_a_removed_field_is_reported_by_name(vllm: VllmProcess) -> None:
    fault = vllm.find_fault("vllm.v1.kv_cache_interface:KVCacheTensor", fields=["offset", "gone"])

    assert fault == "vllm.v1.kv_cache_interface:KVCacheTensor lacks the field(s) gone"


def test_the_document_names_both_releases() -> None:
    document = (ROOT / "docs/vllm-versions.md").read_text()

    for version in (*PROVEN_VERSIONS, vllm_next.VERSION):
        assert version in document


def _make_wheel(path: Path, version: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr("vllm/_C.abi3.so", "compiled")
        archive.writestr(
            f"vllm-{version}.dist-info/METADATA", f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n"
        )
        archive.writestr(f"vllm-{version}.dist-info/entry_points.txt", "[console_scripts]\n")
    return path


def test_only_python_files_and_the_metadata_are_kept_of_a_wheel(tmp_path: Path) -> None:
    wheel = _make_wheel(tmp_path / "vllm.whl", f"{vllm_next.VERSION}+cu129")

    assert vllm_next.extract_python(wheel, tmp_path / "source") == 2
    kept = [path.relative_to(tmp_path / "source") for path in (tmp_path / "source").rglob("*") if path.is_file()]
    assert sorted(str(path) for path in kept) == [
        f"vllm-{vllm_next.VERSION}+cu129.dist-info/METADATA",
        "vllm/__init__.py",
    ]


def test_a_wheel_of_another_version_is_refused(tmp_path: Path) -> None:
    wheel = _make_wheel(tmp_path / "vllm.whl", "0.1.0")

    with pytest.raises(vllm_next.FetchError, match=rf"vLLM 0\.1\.0, but {vllm_next.VERSION} was asked for"):
        vllm_next.extract_python(wheel, tmp_path / "source")


def test_a_failed_download_says_what_to_do_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")

    with pytest.raises(vllm_next.FetchError, match=r"pip config list.*336 MB.*`make vllm-next`"):
        vllm_next.fetch_source(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []
