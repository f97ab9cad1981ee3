"""The reward of an answer: 1 for the right one, and up to a half for one that is partly right."""


def score(solution_str: str, ground_truth: str) -> dict[str, float]:
    """`score` is what the model learns from; `acc` is 1 for a right answer, else 0, and its mean is the accuracy.

    Partial credit, half the share of characters that stand in the right place, tells a near miss from nonsense.
    """
    answer = solution_str.strip()
    right = float(answer == ground_truth)
    same = sum(a == b for a, b in zip(answer, ground_truth, strict=False))
    return {"score": right or 0.5 * same / max(len(answer), len(ground_truth)), "acc": right}
