"""Pipeline parallelism on CPU: room for what a stage receives from the one before it."""

from functools import wraps
from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def apply() -> None:
    """Allocate a later stage's `intermediate_tensors` when its model is loaded, instead of in a dummy run.

    On CPU no dummy run happens when the model runs eagerly, so the first real step would meet `None`.
    """
    original = CPUModelRunner.load_model

    @wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    CPUModelRunner.load_model = load_model
