"""From one layout to another: who owns which slice, and who sends what to whom."""
