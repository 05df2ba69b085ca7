"""Settings that every test shares: the pinned hypothesis profiles and a fixed number of threads.

`dev` draws fresh examples each run; `ci` draws the same ones every time, so that a red build can be repeated.
Choose with `HYPOTHESIS_PROFILE=ci` or `--hypothesis-profile ci`. No deadline: a first call may load a kernel.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example),
}
settings.register_profile("dev", max_examples=25, **_COMMON)
settings.register_profile("ci", max_examples=25, derandomize=True, database=None, **_COMMON)
settings.register_profile("thorough", max_examples=400, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))
