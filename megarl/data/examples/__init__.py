"""Tasks and tiny models that recipes and tests make for themselves, since they fetch nothing."""
