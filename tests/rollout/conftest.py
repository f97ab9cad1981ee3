"""The servers of tiny models that the tests of this folder share; tests may be coroutines."""

from async_tests import pytest_pyfunc_call  # noqa: F401
from server_fixtures import *  # noqa: F403
