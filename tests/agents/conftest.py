"""Tests of this folder may be coroutines."""

from async_tests import pytest_pyfunc_call  # noqa: F401
