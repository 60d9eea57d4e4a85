"""The flagship's step in NumPy float64, written from its definition; nothing here is shared with `petal`."""

import numpy as np

from oracle import network
from oracle.algorithm import OPTIMIZERS, average_views, copy, cross_entropy

LESSONS = {"plain": ["x"], "view": ["view"], "both": ["x", "view"]}


class NumpyFlagship:
    """Student, teacher, and an average of what they say of a batch and of its mirror images.

    `rates` is a rate per parameter. `target` and `answer` are lists of (network, flipped). The view is `augment(x)`.
    """

    def __init__(self, parameters, *, augment, rates, learn, target, answer, ema, warmup, optimizer):
        self.student, self.teacher = copy(parameters), copy(parameters)
        self.augment, self.lessons, self.target, self.answer = augment, LESSONS[learn], target, answer
        self.ema, self.warmup, self.steps = ema, warmup, 0
        self.optimizers = {rate: OPTIMIZERS[optimizer](rate) for rate in set(rates.values())}
        self.rates = rates

    def says(self, members, x):
        logits = []
        for who, flipped in members:
            weights = self.teacher if who == "teacher" else self.student
            logits.append(network.forward(weights, x[:, :, :, ::-1] if flipped else x)[0])
        return logits[0] if len(logits) == 1 else average_views(np.stack(logits), "probs")

    def step(self, x):
        target, answer = self.says(self.target, x), self.says(self.answer, x)
        total = dict.fromkeys(self.student, 0.0)
        for lesson in self.lessons:
            logits, cache = network.forward(self.student, x if lesson == "x" else self.augment(x))
            gradients = network.backward(self.student, cache, cross_entropy(logits, target)[1])
            total = {name: total[name] + gradients[name] for name in total}
        for rate, optimizer in self.optimizers.items():
            mine = {name: total[name] for name in total if self.rates[name] == rate}
            self.student = optimizer.step(self.student, mine)
        window = np.inf if self.warmup is None else self.warmup + self.steps
        decay = min(self.ema, 1 - 1 / window)
        self.teacher = {name: decay * self.teacher[name] + (1 - decay) * self.student[name] for name in self.teacher}
        self.steps += 1
        return answer
