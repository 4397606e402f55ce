"""For all tests: hypothesis may take its time, so that a busy machine fails nothing."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
