"""What float32 can hold: training computes in it, and a finite float of Python may be infinite there."""

from __future__ import annotations

import struct


def is_finite(number: float) -> bool:
    """Whether the number is neither NaN nor infinite when it is rounded to float32.

    >>> is_finite(3.4e38), is_finite(1e300), is_finite(float("nan"))
    (True, False, False)
    """
    try:
        return -_LARGEST <= struct.unpack("f", struct.pack("f", number))[0] <= _LARGEST
    except (OverflowError, struct.error):  # it would round to infinity, has 400 digits, or is no number
        return False


_LARGEST = (2 - 2**-23) * 2.0**127  # 3.4028e38
EXPECTED = "expected a finite number of float32, at most 3.4e38 in size"
