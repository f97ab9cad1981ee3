"""The conversation by dspy, in its own words: `loop_dspy.py react`; prints the answer."""

import dspy
from conversation import QUESTION, add

dspy.configure(lm=dspy.LM("openai/policy", cache=False))
print(dspy.ReAct("question -> answer", tools=[add], max_iters=3)(question=QUESTION).answer)
