"""What CPU cannot run: that vLLM, the installed release and the next, still does what KVPP relies on there.

docs/vllm-versions.md says for each what follows for KVPP.
"""

import ast
from pathlib import Path

import pytest
import torch.distributed
import vllm_next
from vllm_process import VllmProcess

from vllm_kvpp.plan import split_into_groups

SOURCES = Path(__file__).parents[2] / "src/vllm_kvpp"
CACHE_UPDATE = "vllm::unified_mla_kv_cache_update"


@pytest.mark.proves("asynchronous scheduling")
class TestAsynchronousScheduling:
    def test_a_step_scheduled_ahead_of_its_results_counts_drafts_as_computed(self, vllm: VllmProcess) -> None:
        prefill, first, second, after_rejection, _ = vllm.ask("schedule_asynchronously")

        assert prefill["computed"] == {"request": 0}
        assert first["drafts"] == {"request": 2}
        assert first["computed"] == {"request": 10}
        assert second["computed"] == {"request": 13}
        # The result of `first` is in by then: both of its drafts were rejected.
        assert after_rejection["computed"] == {"request": 13 + 3 - 2}

    def test_the_blocks_of_a_step_scheduled_ahead_hold_what_it_reads(self, vllm: VllmProcess) -> None:
        prefill, *ahead, after_rejection, resumed = vllm.ask("schedule_asynchronously")

        assert prefill["active_blocks"] == resumed["active_blocks"] == []
        # 10 to 16 tokens: one block.
        assert [len(step["active_blocks"]) for step in (*ahead, after_rejection)] == [1, 1, 1]

    def test_only_the_first_step_of_a_request_has_no_history(self, vllm: VllmProcess) -> None:
        steps = vllm.ask("schedule_asynchronously")

        assert [step["has_history"] for step in steps] == [False, True, True, True, False]

    def test_a_preempted_request_begins_without_history(self, vllm: VllmProcess) -> None:
        *_, resumed = vllm.ask("schedule_asynchronously")

        assert resumed["computed"] == {"request": 0}
        assert resumed["scheduled"]["request"] > 10

    def test_every_rank_reads_the_same_step_out_of_a_message(self, vllm: VllmProcess) -> None:
        assert all(step["arrives_equal"] for step in vllm.ask("schedule_asynchronously"))

    def test_the_executor_sends_one_message_with_the_scheduler_output_itself(self, vllm: VllmProcess) -> None:
        message = vllm.ask("record_executor_message")

        assert message == {"messages": 1, "method": "execute_model", "is_the_output": True}

    def test_a_worker_hands_the_scheduler_output_to_the_runner(self, vllm: VllmProcess) -> None:
        assert (
            vllm.find_fault(
                "vllm.v1.worker.gpu_worker:Worker.execute_model",
                parameters=["scheduler_output"],
                source_order=["self.model_runner.execute_model(", "scheduler_output"],
            )
            is None
        )


@pytest.mark.proves("PIECEWISE graphs on a device")
class TestPiecewiseGraphs:
    def test_the_cache_update_splits_the_graph_by_default(self, vllm: VllmProcess) -> None:
        assert CACHE_UPDATE in vllm.ask("list_splitting_ops", settings={})

    def test_inductor_partition_would_record_the_cache_update(self, vllm: VllmProcess) -> None:
        assert CACHE_UPDATE not in vllm.ask("list_splitting_ops", settings={"use_inductor_graph_partition": True})

    def test_the_op_calls_the_hook_of_the_layer_instance_before_the_cache_is_written(self, vllm: VllmProcess) -> None:
        assert vllm.ask("record_cache_update") == ["prepare_kv_cache_update", "update_kv_cache"]


@pytest.mark.proves("prefill context parallelism (PCP)")
class TestPrefillContextParallelism:
    def test_only_runner_v2_has_it(self, vllm: VllmProcess) -> None:
        found = vllm.ask(
            "find_unsupported_by_runner_v1", parallel={"prefill_context_parallel_size": 2}, speculative=None
        )

        assert found == ["prefill context parallel"]

    def test_every_rank_writes_the_tokens_of_all_ranks_to_its_cache(self, vllm: VllmProcess) -> None:
        written = vllm.ask("gather_for_cache", num_ranks=2, num_tokens=3)

        assert written == {"tokens": [0, 1, 2, 3, 4, 5], "slots": [0, 1, 2, 3, 4, 5]}

    def test_the_cache_update_gathers_before_it_writes(self, vllm: VllmProcess) -> None:
        assert (
            vllm.find_fault(
                "vllm.model_executor.layers.attention.mla_attention:MLAAttention.update_kv_cache",
                source_order=["maybe_gather_mla_latent_cache_inputs(", "self.impl.do_kv_cache_update("],
            )
            is None
        )

    def test_the_scheduler_gives_each_block_to_all_ranks_whole(self, vllm: VllmProcess) -> None:
        fault = vllm.find_fault(
            "vllm.v1.core.sched.scheduler:Scheduler.__init__", source_order=["KVCacheManager(", "pcp_world_size=1,"]
        )

        assert fault is None

    @pytest.mark.parametrize("sizes", [(2, 2, 1, 1), (2, 3, 2, 1), (2, 2, 3, 2), (4, 1, 2, 2)])
    def test_a_group_of_ours_is_the_union_of_the_tp_and_pcp_groups_of_a_stage(
        self, vllm: VllmProcess, sizes: tuple[int, int, int, int]
    ) -> None:
        tensor, context, pipeline, data = sizes
        named = {
            "tensor_parallel_size": tensor,
            "prefill_context_parallel_size": context,
            "pipeline_parallel_size": pipeline,
            "data_parallel_size": data,
        }
        groups = vllm.ask("list_groups", sizes=named)
        ours = split_into_groups(tensor * context * pipeline * data, **named)

        for kind in ("tp", "pcp"):
            for ranks in groups[kind]:
                assert any(set(ranks) <= set(group) for group in ours), f"{kind} group {ranks} against {ours}"
        assert {len(group) for group in ours} == {tensor * context}


@pytest.mark.proves("Ray")
class TestRay:
    def test_its_executor_sends_steps_as_the_multi_process_one_does(self, vllm: VllmProcess) -> None:
        executor = vllm.ask("read_class", file="v1/executor/ray_executor_v2.py", name="RayExecutorV2")

        assert executor["bases"] == ["MultiprocExecutor"]
        assert not {"execute_model", "collective_rpc"} & set(executor["methods"])

    def test_the_installed_release_uses_it_by_default(self, installed_vllm: VllmProcess) -> None:
        assert installed_vllm.ask("get_environment_default", name="VLLM_USE_RAY_V2_EXECUTOR_BACKEND") is True

    def test_the_older_executor_calls_the_runner_past_the_worker(self, installed_vllm: VllmProcess) -> None:
        folder = Path(installed_vllm.ask("describe_release")["file"]).parent

        assert "self.worker.model_runner.execute_model(" in (folder / "v1/executor/ray_utils.py").read_text()

    def test_the_next_release_has_no_older_executor(self, next_vllm: VllmProcess) -> None:
        assert not (vllm_next.FOLDER / "vllm/v1/executor/ray_executor.py").exists()
        assert next_vllm.ask("get_environment_default", name="VLLM_USE_RAY_V2_EXECUTOR_BACKEND") is None


@pytest.mark.proves("NCCL, HCCL and other devices")
class TestOtherDevices:
    @pytest.mark.parametrize("file", sorted(SOURCES.rglob("*.py")), ids=lambda path: path.name)
    def test_no_part_names_a_device_library(self, file: Path) -> None:
        tree = ast.parse(file.read_text())
        used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}

        assert not {name for name in used if name.startswith(("torch.cuda", "torch.npu", "torch.xpu", "torch.hip"))}

    def test_transfers_use_public_collectives_of_torch_only(self) -> None:
        files = [*SOURCES.glob("transport/*.py"), SOURCES / "vllm_seam/groups.py"]
        nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
        used = {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dist"
        }

        assert "broadcast" in used
        assert not {name for name in used if not hasattr(torch.distributed, name)}
        assert not {name for name in used if name.startswith("_") or "nccl" in name.lower() or "gloo" in name.lower()}


class TestSleepMode:
    def test_level_1_forgets_the_prefix_cache_before_memory_goes(self, vllm: VllmProcess) -> None:
        fault = vllm.find_fault(
            "vllm.v1.engine.core:EngineCore.sleep",
            source_order=["clear_prefix_cache = level >= 1", "self.pause_scheduler(", "model_executor.sleep(level)"],
        )

        assert fault is None

    def test_the_kv_cache_is_dropped_and_not_kept_in_host_memory(self, vllm: VllmProcess) -> None:
        backend = vllm.ask("read_source", path="vllm.device_allocator.sleep_mode_backend:CuMemBackend.suspend")

        assert "allocator.sleep(offload_tags=offload_tags)" in backend
        assert "kv_cache" not in backend

    def test_waking_up_maps_memory_at_the_same_addresses_so_that_views_stay_valid(self, vllm: VllmProcess) -> None:
        fault = vllm.find_fault(
            "vllm.device_allocator.cumem:CuMemAllocator.wake_up",
            source_order=[
                "for ptr, data in self.pointer_to_data.items()",
                "handle = data.handle",
                "create_and_map(handle)",
            ],
        )

        assert fault is None

    def test_communicators_of_vllm_only_are_suspended(self, vllm: VllmProcess) -> None:
        source = vllm.ask("read_source", path="vllm.distributed.parallel_state:_apply_to_device_comms")

        assert "for group_ref in _groups.values()" in source


@pytest.mark.proves("`dspark` drafts")
class TestDspark:
    def test_only_runner_v2_has_it_and_adaptive_verification(self, vllm: VllmProcess) -> None:
        found = vllm.ask(
            "find_unsupported_by_runner_v1",
            parallel={},
            speculative={"method": "dspark", "enable_adaptive_verification": True},
        )

        assert found == ["dspark speculative decoding", "adaptive draft verification"]

    def test_verification_is_fixed_unless_asked(self, vllm: VllmProcess) -> None:
        source = vllm.ask("read_source", path="vllm.config:SpeculativeConfig")

        assert "enable_adaptive_verification: bool = False" in source

    def test_its_speculator_names_the_draft_layers(self, vllm: VllmProcess) -> None:
        fault = vllm.find_fault(
            "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.load_model",
            source_order=["self.draft_attn_layer_names = ", ".is_draft_layer = True"],
        )

        assert fault is None


class TestDraftLayers:
    @pytest.mark.parametrize(
        "path",
        [
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_kv_cache_spec",
            "vllm.v1.worker.gpu.attn_utils:get_kv_cache_spec",
        ],
        ids=["runner_v1", "runner_v2"],
    )
    def test_the_next_release_marks_them_in_their_cache_spec(self, next_vllm: VllmProcess, path: str) -> None:
        assert next_vllm.find_fault("vllm.v1.kv_cache_interface:KVCacheSpec", fields=["is_draft"]) is None
        assert next_vllm.find_fault(path, source_order=["if attn_module.is_draft_layer:", "is_draft=True"]) is None

    def test_the_installed_release_does_not(self, installed_vllm: VllmProcess) -> None:
        fault = installed_vllm.find_fault("vllm.v1.kv_cache_interface:KVCacheSpec", fields=["is_draft"])

        assert fault == "vllm.v1.kv_cache_interface:KVCacheSpec lacks the field(s) is_draft"
