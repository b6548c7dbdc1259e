from hypothesis import settings

# Examples run on shared processors, where the time of one says nothing.
settings.register_profile("unit", deadline=None)
settings.load_profile("unit")
