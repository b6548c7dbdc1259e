import pytest

from vllm_kvpp.config import KVPPOptions, KVPPSettings, read_settings
from vllm_kvpp.errors import KVPPConfigError

KNOWN = "transfer, decode, transport, staging_mib, transfer_timeout_seconds"


def reasons_against(additional_config):
    with pytest.raises(KVPPConfigError) as caught:
        read_settings(additional_config)
    return caught.value.reasons


def test_kvpp_is_off_by_default():
    assert read_settings({}) == KVPPSettings(is_enabled=False, options=KVPPOptions())


def test_settings_of_other_features_are_left_alone():
    assert not read_settings({"torchair_graph_config": {"enabled": True}}).is_enabled


@pytest.mark.parametrize("value", [True, "true", "True", "TRUE", 1, "1"])
def test_every_spelling_of_true_turns_kvpp_on(value):
    assert read_settings({"enable_kvpp": value}).is_enabled is True


@pytest.mark.parametrize("value", [False, "false", "False", "FALSE", 0, "0"])
def test_every_spelling_of_false_leaves_kvpp_off(value):
    assert read_settings({"enable_kvpp": value}).is_enabled is False


@pytest.mark.parametrize("value", ["maybe", "", None, 2, -1, 0.5, [], {}])
def test_a_switch_that_is_no_boolean_is_refused_naming_setting_and_value(value):
    (reason,) = reasons_against({"enable_kvpp": value})

    assert reason == f"enable_kvpp is {value!r}, which is not a boolean; use true or false."


def test_an_unknown_option_is_refused_with_the_known_ones():
    (reason,) = reasons_against({"kvpp": {"transfer_timeout": 5}})

    assert reason == f"kvpp.transfer_timeout is not an option; the known ones are: {KNOWN}."


def test_an_unknown_option_is_refused_while_kvpp_is_off():
    assert reasons_against({"enable_kvpp": False, "kvpp": {"transfers": "auto"}})


@pytest.mark.parametrize("value", [None, True, "transfer_timeout_seconds", 5, ["transfer_timeout_seconds"]])
def test_options_that_are_no_object_are_refused_with_the_known_keys(value):
    (reason,) = reasons_against({"kvpp": value})

    assert reason == f"kvpp is {value!r}; it has to be an object with keys out of: {KNOWN}."


def test_all_reasons_are_listed_at_once():
    reasons = reasons_against({"enable_kvpp": "maybe", "kvpp": {"transfer_timeout_seconds": 0, "stages": 3}})

    assert [reason.split(" is ")[0] for reason in reasons] == [
        "enable_kvpp",
        "kvpp.transfer_timeout_seconds",
        "kvpp.stages",
    ]


def test_a_bad_switch_and_options_that_are_no_object_are_both_listed():
    assert len(reasons_against({"enable_kvpp": 2, "kvpp": []})) == 2


def test_a_transfer_may_take_five_minutes_by_default():
    assert read_settings({"enable_kvpp": True}).options.transfer_timeout_seconds == 300


@pytest.mark.parametrize(("value", "seconds"), [(5, 5.0), (0.5, 0.5), ("5", 5.0), (86_400, 86_400.0)])
def test_a_positive_number_of_seconds_up_to_a_day_is_a_timeout(value, seconds):
    settings = read_settings({"enable_kvpp": True, "kvpp": {"transfer_timeout_seconds": value}})

    assert settings.options.transfer_timeout_seconds == seconds


@pytest.mark.parametrize("value", [0, -1, 86_401, float("inf"), float("-inf"), float("nan"), None, "soon", []])
def test_a_timeout_out_of_bounds_is_refused_naming_option_and_value(value):
    (reason,) = reasons_against({"kvpp": {"transfer_timeout_seconds": value}})

    assert reason.startswith(f"kvpp.transfer_timeout_seconds is {value!r}: Input should be ")


def test_a_boolean_is_no_timeout():
    (reason,) = reasons_against({"kvpp": {"transfer_timeout_seconds": True}})

    assert reason == (
        "kvpp.transfer_timeout_seconds is True: Value error, input should be a number, not a boolean. "
        "(valid: above 0, up to 86400)"
    )


def test_settings_cannot_be_changed_after_they_were_read():
    options = read_settings({}).options

    with pytest.raises(ValueError, match="frozen"):
        options.transfer_timeout_seconds = 1.0


def test_what_is_cheaper_moves_by_the_fastest_way_by_default():
    options = read_settings({"enable_kvpp": True}).options

    assert (options.transfer, options.transport, options.staging_bytes) == ("auto", "auto", None)


@pytest.mark.parametrize("value", ["auto", "full", "active"])
def test_every_mode_of_transfer_is_understood(value):
    assert read_settings({"kvpp": {"transfer": value}}).options.transfer == value


@pytest.mark.parametrize("value", ["fast", "", None, 1, True, "Full"])
def test_another_mode_of_transfer_is_refused_with_the_valid_ones(value):
    (reason,) = reasons_against({"kvpp": {"transfer": value}})

    assert reason.startswith(f"kvpp.transfer is {value!r}: ")
    assert reason.endswith("(valid: auto, full, or active)")


def test_decode_tokens_attend_where_that_costs_less_by_default():
    assert read_settings({"enable_kvpp": True}).options.decode == "auto"


@pytest.mark.parametrize("value", ["auto", "in_place", "owner", "transfer"])
def test_every_place_to_decode_is_understood(value):
    assert read_settings({"kvpp": {"decode": value}}).options.decode == value


@pytest.mark.parametrize("value", ["fast", "", None, 1, True, "Owner"])
def test_another_place_to_decode_is_refused_with_the_valid_ones(value):
    (reason,) = reasons_against({"kvpp": {"decode": value}})

    assert reason.startswith(f"kvpp.decode is {value!r}: ")
    assert reason.endswith("(valid: auto, in_place, owner, or transfer)")


def test_reading_in_place_is_refused_where_nobody_reads_anothers_memory():
    (reason,) = reasons_against({"kvpp": {"decode": "in_place", "transport": "broadcast"}})

    assert reason.startswith(
        "kvpp.decode is in_place, but with kvpp.transport broadcast no rank reads another's memory"
    )
    assert reason.endswith("set kvpp.transport to auto, or kvpp.decode to auto, owner or transfer.")


def test_another_transport_is_refused_with_the_valid_ones():
    (reason,) = reasons_against({"kvpp": {"transport": "nccl"}})

    assert reason.startswith("kvpp.transport is 'nccl': ")
    assert reason.endswith("(valid: auto or broadcast)")


def test_staging_memory_is_asked_for_in_mebibytes():
    assert read_settings({"kvpp": {"staging_mib": 16}}).options.staging_bytes == 16 * 1024 * 1024


@pytest.mark.parametrize("value", [-1, 0, 0.5, 65_537, True, "much", [], float("nan")])
def test_other_sizes_of_staging_memory_are_refused_with_the_valid_range(value):
    (reason,) = reasons_against({"kvpp": {"staging_mib": value}})

    assert reason.startswith(f"kvpp.staging_mib is {value!r}: ")
    assert reason.endswith("(valid: 1 to 65536, in MiB)")


def test_staging_memory_for_whole_layers_is_refused_as_useless():
    (reason,) = reasons_against({"kvpp": {"transfer": "full", "staging_mib": 16}})

    assert reason == (
        "kvpp.staging_mib is 16, but whole layers need no staging memory; leave it out, or set kvpp.transfer to auto "
        "or active."
    )
