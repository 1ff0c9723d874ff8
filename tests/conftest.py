"""Settings for all tests: on a loaded machine one example may take long, which is no failure."""

import hypothesis

hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")
