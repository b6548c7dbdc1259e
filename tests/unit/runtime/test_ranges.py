import torch

from vllm_kvpp.runtime.ranges import profile_range


def list_ranges(profile):
    return [event.key for event in profile.key_averages()]


def test_a_range_shows_in_a_profile_under_its_name():
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        profile_range("kvpp.some"),
    ):
        torch.zeros(1)

    assert "kvpp.some" in list_ranges(profile)


def test_while_nobody_profiles_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr(torch.profiler, "record_function", lambda name: 1 / 0)

    with profile_range("kvpp.some"):
        pass


def test_where_torch_does_not_say_whether_somebody_profiles_ranges_are_made(monkeypatch):
    monkeypatch.delattr(torch.autograd.profiler, "_is_profiler_enabled")

    assert isinstance(profile_range("kvpp.some"), torch.profiler.record_function)
