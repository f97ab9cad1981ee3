"""The servers of tiny models that the tests of this folder share."""

from server_fixtures import *  # noqa: F403
