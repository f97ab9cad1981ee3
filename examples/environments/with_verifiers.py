"""A taskset of verifiers, which needs no line for megarl: an adapter runs it where it lies in the folder of the run.

agent.fn=verifiers:with_verifiers
"""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    truth: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.truth)


class Sums(vf.Taskset[SumTask]):
    def load(self):
        for a in range(10, 100):
            yield SumTask(SumData(prompt=f"{a}+{a + 7}=", truth=str(2 * a + 7)), self.config.task)


__all__ = ["Sums"]
