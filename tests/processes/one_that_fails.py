"""A rank of which the second fails, while the others sleep."""

import os
import sys
import time

if os.environ["RANK"] == "1":
    print("the shelf is empty")
    sys.exit(3)
time.sleep(600)  # longer than a test may take
