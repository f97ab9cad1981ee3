"""Policy losses and the value loss: functions of packed [T] columns that return one number a token."""
