import importlib
import inspect
import pickle

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvpp.vllm_seam.worker import KVPPWorkerMixin
from vllm_kvpp.vllm_seam.worker_class import is_kvpp_worker, name_kvpp_worker

CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
MODULE = "vllm_kvpp.vllm_seam.worker_class"


def test_the_name_carries_the_worker_that_the_platform_chose():
    assert name_kvpp_worker(CPU_WORKER) == f"{MODULE}.KVPPWorker<vllm:v1:worker:cpu_worker:CPUWorker>"


def test_the_name_splits_at_its_last_dot_into_module_and_class():
    assert name_kvpp_worker(CPU_WORKER).rsplit(".", 1)[0] == MODULE


def test_our_own_name_is_recognised_and_others_are_not():
    assert is_kvpp_worker(name_kvpp_worker(CPU_WORKER))
    assert not is_kvpp_worker(CPU_WORKER)
    assert not is_kvpp_worker("auto")


def test_vllm_resolves_the_name_to_our_mixin_before_the_platforms_worker():
    worker_class = resolve_obj_by_qualname(name_kvpp_worker(CPU_WORKER))
    order = inspect.getmro(worker_class)

    assert order.index(KVPPWorkerMixin) < order.index(CPUWorker)


@pytest.mark.parametrize("method", ["init_device", "determine_available_memory", "initialize_from_config"])
def test_our_methods_stand_before_those_of_the_platforms_worker(method):
    worker_class = resolve_obj_by_qualname(name_kvpp_worker(CPU_WORKER))

    assert getattr(worker_class, method) is getattr(KVPPWorkerMixin, method)


@pytest.mark.parametrize("method", ["execute_model", "load_model", "get_kv_cache_spec", "compile_or_warm_up_model"])
def test_every_other_method_is_the_platforms(method):
    worker_class = resolve_obj_by_qualname(name_kvpp_worker(CPU_WORKER))

    assert getattr(worker_class, method) is getattr(CPUWorker, method)


def test_the_same_name_resolves_to_the_same_class():
    name = name_kvpp_worker(CPU_WORKER)

    assert resolve_obj_by_qualname(name) is resolve_obj_by_qualname(name)


def test_the_class_is_called_after_the_platforms_worker():
    assert resolve_obj_by_qualname(name_kvpp_worker(CPU_WORKER)).__name__ == "KVPPCPUWorker"


def test_a_worker_that_does_not_exist_is_missing_by_its_own_name():
    with pytest.raises(ModuleNotFoundError, match="no_such_platform"):
        resolve_obj_by_qualname(name_kvpp_worker("no_such_platform.worker.Worker"))


def test_the_name_survives_the_way_to_another_process():
    name = pickle.loads(pickle.dumps(name_kvpp_worker(CPU_WORKER)))

    assert issubclass(resolve_obj_by_qualname(name), CPUWorker)


@pytest.mark.parametrize("name", ["KVPPWorker", "KVPPWorker<", "Worker<a:B>"])
def test_any_other_name_is_no_attribute_of_the_module(name):
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
        getattr(importlib.import_module(MODULE), name)
