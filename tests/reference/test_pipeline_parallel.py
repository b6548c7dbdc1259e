from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mla_cpu_reference import pipeline_parallel
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def _load_on(monkeypatch: pytest.MonkeyPatch, *, is_first_rank: bool) -> Any:
    """A runner after `load_model`, whose model makes room for one tensor of `[tokens, 8]`."""
    monkeypatch.setattr(CPUModelRunner, "load_model", lambda self: None)
    monkeypatch.setattr(pipeline_parallel, "get_pp_group", lambda: SimpleNamespace(is_first_rank=is_first_rank))
    pipeline_parallel.apply()
    model = SimpleNamespace(
        make_empty_intermediate_tensors=lambda batch_size, dtype, device: {
            "hidden_states": torch.zeros(batch_size, 8, dtype=dtype, device=device)
        }
    )
    runner = SimpleNamespace(
        model=model,
        max_num_tokens=32,
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        device=torch.device("cpu"),
        intermediate_tensors=None,
    )
    CPUModelRunner.load_model(runner)
    return runner


def test_a_later_stage_has_room_for_the_largest_batch_once_its_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_states = _load_on(monkeypatch, is_first_rank=False).intermediate_tensors["hidden_states"]
    assert hidden_states.shape == (32, 8)
    assert hidden_states.dtype == torch.bfloat16


def test_the_first_stage_receives_nothing_and_has_no_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _load_on(monkeypatch, is_first_rank=True).intermediate_tensors is None
