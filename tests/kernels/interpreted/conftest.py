"""These tests run under Triton's interpreter."""

from chatd_kernels.interpreted_tests import *  # noqa: F403
