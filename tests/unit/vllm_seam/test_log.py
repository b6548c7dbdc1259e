from vllm_kvpp.vllm_seam.log import logger


def test_our_logger_is_below_the_one_that_vllm_gives_a_handler():
    assert logger.name.startswith("vllm.")
