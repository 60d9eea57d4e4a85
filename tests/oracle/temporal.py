"""The prior from the order of the stream, image by image in plain Python, written from the description of the algorithm."""

import math
from collections.abc import Sequence

SCALES, FLOORS, NULL, TEMPERATURES = (1, 2, 4, 8), (0.02, 0.2, 0.6), 100, (1.0, 1.4, 2.0, 2.8)


def softmax(logits: Sequence[float], temperature: float) -> list[float]:
    """Probabilities, none of them zero."""
    top = max(logits)
    weights = [math.exp((value - top) / temperature) for value in logits]
    total = sum(weights)
    return [(1 - 1e-6) * weight / total + 1e-6 / len(logits) for weight in weights]


INFORMED = [(k, f, t) for k in SCALES for f in FLOORS for t in TEMPERATURES]
NULLS = [(NULL, 0.02, 1.0), (math.inf, 0.02, 1.0)]


def corrected(
    batch: Sequence[Sequence[float]], keys: Sequence[str] | None = None, look_back: bool = False
) -> list[list[float]]:
    """The answers to logits, in order. An expert has a time scale, a share of the uniform distribution and a temperature."""
    count = len(batch[0])
    uniform = [1 / count] * count
    experts = INFORMED + NULLS
    first = {e: 0.1 / len(INFORMED) for e in INFORMED} | dict.fromkeys(NULLS, 0.45)
    mean = dict.fromkeys(TEMPERATURES, uniform)
    keys = keys or [""] * len(batch)
    recent = {key: dict.fromkeys((*SCALES, NULL, math.inf), uniform) for key in keys}
    belief, seen = dict.fromkeys(keys, first), dict.fromkeys(keys, 0)
    answers, ratios = [], []
    for number, (logits, key) in enumerate(zip(batch, keys, strict=True)):
        p = {t: softmax(logits, t) for t in TEMPERATURES}
        ratio = {t: [a / b for a, b in zip(p[t], mean[t], strict=True)] for t in TEMPERATURES}
        w, past = belief[key], recent[key]
        prior = {(k, f): [(1 - f) * value + f / count for value in past[k]] for k, f, _ in experts}
        evidence = {(k, f, t): sum(a * b for a, b in zip(prior[k, f], ratio[t], strict=True)) for k, f, t in experts}
        joint = [sum(w[k, f, t] * prior[k, f][y] * ratio[t][y] for k, f, t in experts) for y in range(count)]
        total = sum(joint)
        answer = [value / total for value in joint]
        belief[key] = {e: 0.999 * w[e] * evidence[e] / total + 0.001 * first[e] for e in experts}
        said = [value / sum(ratio[1.0]) for value in ratio[1.0]]
        for k in SCALES:
            past[k] = [m + (a - m) / k for m, a in zip(past[k], answer, strict=True)]
        past[NULL] = [m + (a - m) / min(NULL, seen[key] + 10) for m, a in zip(past[NULL], said, strict=True)]
        mean = {t: [m + (a - m) / min(500, number + 50) for m, a in zip(mean[t], p[t], strict=True)] for t in TEMPERATURES}
        seen[key] += 1
        answers.append(answer)
        ratios.append(ratio)
    if look_back:       # the images in the other order, nulls uniform, beliefs of the end: forecasts multiply the answers
        (w,), past = belief.values(), dict.fromkeys((*SCALES, NULL, math.inf), uniform)
        for number in reversed(range(len(batch))):
            ratio = ratios[number]
            prior = {(k, f): [(1 - f) * value + f / count for value in past[k]] for k, f, _ in experts}
            forecast = [sum(w[k, f, t] * prior[k, f][y] for k, f, t in experts) for y in range(count)]
            joint = [sum(w[k, f, t] * prior[k, f][y] * ratio[t][y] for k, f, t in experts) for y in range(count)]
            both = [a * b for a, b in zip(answers[number], forecast, strict=True)]
            answers[number] = [value / sum(both) for value in both]
            evidence = {(k, f, t): sum(a * b for a, b in zip(prior[k, f], ratio[t], strict=True)) for k, f, t in experts}
            w = {e: 0.999 * w[e] * evidence[e] / sum(joint) + 0.001 * first[e] for e in experts}
            for k in SCALES:
                past[k] = [m + (a / sum(joint) - m) / k for m, a in zip(past[k], joint, strict=True)]
    return answers
