"""The prior from the order of the stream, image by image in plain Python, written from the description of the algorithm."""

import math
from collections.abc import Sequence

SCALES, NULL, TEMPERATURES = (1, 2, 4, 8, 16), 100, (1.0, 1.25, 1.5, 2.0)


def softmax(logits: Sequence[float], temperature: float) -> list[float]:
    top = max(logits)
    weights = [math.exp((value - top) / temperature) for value in logits]
    total = sum(weights)
    return [(1 - 1e-6) * weight / total + 1e-6 / len(logits) for weight in weights]


def corrected(batch: Sequence[Sequence[float]]) -> list[list[float]]:
    """The answers to logits, in order. An expert is a pair of a time scale and a temperature, or a null."""
    count = len(batch[0])
    uniform = [1 / count] * count
    experts = [(k, t) for k in SCALES for t in TEMPERATURES] + [(NULL, 1.0), (math.inf, 1.0)]
    first = {e: 1 / 7 / (len(TEMPERATURES) if e[0] in SCALES else 1) for e in experts}
    recent, mean, belief = {k: uniform for k, _ in experts}, dict.fromkeys(TEMPERATURES, uniform), dict(first)
    answers = []
    for logits in batch:
        p = {t: softmax(logits, t) for t in TEMPERATURES}
        q = {t: [a / b for a, b in zip(p[t], mean[t], strict=True)] for t in TEMPERATURES}
        prior = {k: [0.98 * value + 0.02 / count for value in average] for k, average in recent.items()}
        evidence = {(k, t): sum(a * b for a, b in zip(prior[k], q[t], strict=True)) for k, t in experts}
        joint = [sum(belief[k, t] * prior[k][y] * q[t][y] for k, t in experts) for y in range(count)]
        total = sum(joint)
        answer = [value / total for value in joint]
        belief = {e: 0.999 * belief[e] * evidence[e] / total + 0.001 * first[e] for e in experts}
        said = [value / sum(q[1.0]) for value in q[1.0]]
        for k in SCALES:
            recent[k] = [m + (a - m) / k for m, a in zip(recent[k], answer, strict=True)]
        recent[NULL] = [m + (a - m) / NULL for m, a in zip(recent[NULL], said, strict=True)]
        mean = {t: [m + (a - m) / 500 for m, a in zip(mean[t], p[t], strict=True)] for t in TEMPERATURES}
        answers.append(answer)
    return answers
