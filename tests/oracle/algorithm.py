"""PETAL and its baselines in plain NumPy float64, written from the paper: the numbers the library is tested against.

Nothing here shares code with `petal`. Parameters are dicts name -> array, logits are [N, classes], and every gradient
is derived by hand. A network is anything with `forward` and `backward` as in `oracle.network`.
"""

import numpy as np

from oracle import network as small_network

# ---------------------------------------------------------------- probabilities and losses


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def softmax(logits):
    return np.exp(log_softmax(logits))


def average_views(logits, average):
    """Logits [K, N, classes] of the K views -> logits [N, classes] of their average: "probs" or "logits"."""
    if average == "logits":
        return logits.mean(axis=0)
    log_probs = log_softmax(logits)
    peak = log_probs.max(axis=0)
    return peak + np.log(np.exp(log_probs - peak).mean(axis=0))  # log of the mean probability


def cross_entropy(logits, target):
    """Batch mean of H(y', y), y' = softmax(target), and its gradient with respect to the student's logits."""
    log_y, weights = log_softmax(logits), softmax(target)
    return -(weights * log_y).sum(axis=1).mean(), (np.exp(log_y) - weights) / len(logits)


def symmetric_cross_entropy(logits, target):
    """Batch mean of H(y', y) / 2 + H(y, y') / 2, and its gradient with respect to the student's logits."""
    forward_loss, forward_grad = cross_entropy(logits, target)
    y, log_target = softmax(logits), log_softmax(target)
    reverse = -(y * log_target).sum(axis=1, keepdims=True)
    reverse_grad = -y * (log_target + reverse) / len(logits)
    return 0.5 * forward_loss + 0.5 * reverse.mean(), 0.5 * forward_grad + 0.5 * reverse_grad


def entropy(logits):
    """Batch mean of the prediction's entropy (TENT), and its gradient with respect to the logits."""
    log_y = log_softmax(logits)
    y = np.exp(log_y)
    each = -(y * log_y).sum(axis=1, keepdims=True)
    return each.mean(), -y * (log_y + each) / len(logits)


def pseudo_label(logits):
    """Batch mean of the cross-entropy with the most probable class as label, and its gradient."""
    n = np.arange(len(logits))
    label, log_y = logits.argmax(axis=1), log_softmax(logits)
    grad = np.exp(log_y)
    grad[n, label] -= 1
    return -log_y[n, label].mean(), grad / len(logits)


LOSSES = {"cross-entropy": cross_entropy, "symmetric": symmetric_cross_entropy}


def negative_log_prior(params, mean, var, damping):
    """-log q(theta) = 0.5 sum (theta - mean)^2 / (max(var, 0) + damping) up to its constant, and its gradient."""
    scaled = {name: (params[name] - mean[name]) / (np.maximum(var[name], 0) + damping) for name in params}
    value = 0.5 * sum(((params[name] - mean[name]) * scaled[name]).sum() for name in params)
    return value, scaled


# ---------------------------------------------------------------- optimizers and restoration


class Adam:
    """Bias-corrected Adam, as torch.optim.Adam without weight decay."""

    def __init__(self, lr, betas=(0.9, 0.999), eps=1e-8):
        self.lr, self.betas, self.eps, self.t = lr, betas, eps, 0
        self.first, self.second = {}, {}

    def step(self, params, grads):
        """New parameters; those without a gradient stay."""
        self.t += 1
        b1, b2 = self.betas
        new = dict(params)
        for name, g in grads.items():
            self.first[name] = b1 * self.first.get(name, 0.0) + (1 - b1) * g
            self.second[name] = b2 * self.second.get(name, 0.0) + (1 - b2) * g**2
            first = self.first[name] / (1 - b1**self.t)
            second = self.second[name] / (1 - b2**self.t)
            new[name] = params[name] - self.lr * first / (np.sqrt(second) + self.eps)
        return new


class SGD:
    """SGD with Nesterov momentum, as torch.optim.SGD(momentum=0.9, nesterov=True): the first buffer is the gradient."""

    def __init__(self, lr, momentum=0.9):
        self.lr, self.momentum, self.buffer = lr, momentum, {}

    def step(self, params, grads):
        """New parameters; those without a gradient stay."""
        new = dict(params)
        for name, g in grads.items():
            self.buffer[name] = self.momentum * self.buffer.get(name, 0.0) + g
            new[name] = params[name] - self.lr * (g + self.momentum * self.buffer[name])
        return new


OPTIMIZERS = {"adam": Adam, "sgd": SGD}


def quantile(values, q):
    """The q-quantile of all values, linear between the two order statistics around rank q (n - 1)."""
    ordered = np.sort(np.concatenate([np.ravel(v) for v in values]))
    rank = q * (len(ordered) - 1)
    below = int(np.floor(rank))
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (rank - below) * (ordered[above] - ordered[below])


def copy(params):
    return {name: np.array(value, dtype=np.float64) for name, value in params.items()}


# ---------------------------------------------------------------- methods


class NumpyPetal:
    """PETAL, Algorithms 1 and 2; batch-statistics normalisation in student, teacher and source.

    restore: ("fisher", q), ("stochastic-mask", callable) where callable() gives a dict name -> mask at every update
    (true: back to the source), or None. augment(x, i) gives the i-th view of the batch; it is called for
    i = 0 .. views - 1 when views are needed and never otherwise. With steps > 1 the whole of Algorithm 2 is repeated on
    the batch, views included, and the last prediction returned. A sample whose gate is closed gets the teacher's plain
    logits, not normalised. Until the gate first opens, student and teacher are one network and the gradient is rounding
    noise, of which Adam makes full steps: compare weights only in runs whose gate opens on the first batch.

    After `step`, of its last update: `source_confidence` [N], `opened` [N] (samples that took the views' average),
    `loss`, `grads` (of the total loss), `fisher`, `threshold` (None without Fisher) and `restored` (masks by name).
    """

    def __init__(
        self,
        mean,
        var,
        *,
        augment,
        lr=1e-3,
        ema=0.999,
        views=32,
        confidence=0.92,
        prior_weight=1e-9,
        damping=1e-6,
        restore=("fisher", 0.03),
        gate="sample",
        average="probs",
        loss="cross-entropy",
        optimizer="adam",
        steps=1,
        network=small_network,
    ):
        if gate not in ("sample", "batch") or average not in ("probs", "logits") or loss not in LOSSES:
            raise ValueError(f"no such variant: {gate=}, {average=}, {loss=}")
        if restore is not None and restore[0] not in ("fisher", "stochastic-mask"):
            raise ValueError(f"no such variant: {restore=}")
        self.source, self.student, self.teacher = copy(mean), copy(mean), copy(mean)  # Alg. 1, l. 3-4
        self.var = copy(var) if var is not None else None
        self.augment, self.ema, self.views, self.confidence = augment, ema, views, confidence
        self.prior_weight, self.damping, self.restore = prior_weight, damping, restore
        self.gate, self.average, self.loss_function = gate, average, LOSSES[loss]
        self.optimizer, self.steps, self.network = OPTIMIZERS[optimizer](lr), steps, network

    def step(self, x):
        """Predict and adapt: the teacher's logits, averaged over views where the gate is open, before its update."""
        for _ in range(self.steps):
            logits = self._adapt(x)
        return logits

    def predict(self, params, x):
        return self.network.forward(params, x)[0]

    def teacher_prediction(self, x):
        """Logits of y' (Alg. 2, l. 3-5)."""
        plain = self.predict(self.teacher, x)
        self.source_confidence = softmax(self.predict(self.source, x)).max(axis=1)
        if self.gate == "batch":
            self.opened = np.full(len(x), self.source_confidence.mean() < self.confidence)
        else:
            self.opened = self.source_confidence < self.confidence
        if not self.opened.any():
            return plain
        views = np.stack([self.predict(self.teacher, self.augment(x, i)) for i in range(self.views)])
        return np.where(self.opened[:, None], average_views(views, self.average), plain)

    def total_loss(self, params, x, target):
        """H(y', y) over the batch - prior_weight log q(theta), to be minimised (l. 6-10), and its gradient."""
        logits, cache = self.network.forward(params, x)
        loss, grad_logits = self.loss_function(logits, target)
        grads = self.network.backward(params, cache, grad_logits)
        if self.prior_weight:
            prior, prior_grads = negative_log_prior(params, self.source, self.var, self.damping)
            loss = loss + self.prior_weight * prior
            grads = {name: grads[name] + self.prior_weight * prior_grads[name] for name in grads}
        return loss, grads

    def _adapt(self, x):
        target = self.teacher_prediction(x)
        self.loss, self.grads = self.total_loss(self.student, x, target)
        self.student = self.optimizer.step(self.student, self.grads)  # l. 11
        self.teacher = {
            name: self.ema * self.teacher[name] + (1 - self.ema) * self.student[name] for name in self.teacher
        }  # l. 12
        self.fisher = {name: g**2 for name, g in self.grads.items()}  # l. 13
        self.threshold, self.restored = self._masks()  # l. 14
        self.student = {
            name: np.where(self.restored[name], self.source[name], self.student[name]) for name in self.student
        }  # l. 15
        return target

    def _masks(self):
        """The Fisher threshold, if there is one, and which entries go back to the source."""
        if self.restore is None:
            return None, {name: np.zeros(value.shape, dtype=bool) for name, value in self.student.items()}
        kind, how = self.restore
        if kind == "stochastic-mask":
            return None, {name: np.asarray(mask, dtype=bool) for name, mask in how().items()}
        threshold = quantile(self.fisher.values(), how)
        return threshold, {name: f < threshold for name, f in self.fisher.items()}


class NumpyCoTTA(NumpyPetal):
    """CoTTA: PETAL without the prior, from the source's parameters, with the defaults of CoTTA's released code."""

    def __init__(self, parameters, *, augment, restore=None, gate="batch", average="logits", **options):
        super().__init__(
            parameters, None, augment=augment, prior_weight=0.0, restore=restore, gate=gate, average=average, **options
        )


class _AffineMethod:
    """A loss of the logits alone, minimised over the batch-norm affine parameters; returns logits before the update."""

    loss_function = None

    def __init__(
        self,
        parameters,
        *,
        lr=1e-3,
        optimizer="adam",
        steps=1,
        adapted=small_network.BATCH_NORM_AFFINE,
        network=small_network,
    ):
        self.student, self.adapted = copy(parameters), tuple(adapted)
        self.optimizer, self.steps, self.network = OPTIMIZERS[optimizer](lr), steps, network

    def step(self, x):
        """Predict and adapt, `steps` times; the logits of the last forward pass."""
        for _ in range(self.steps):
            logits, cache = self.network.forward(self.student, x)
            self.loss, grad_logits = type(self).loss_function(logits)
            grads = self.network.backward(self.student, cache, grad_logits)
            self.grads = {name: grads[name] for name in self.adapted}
            self.student = self.optimizer.step(self.student, self.grads)
        return logits


class NumpyTent(_AffineMethod):
    """TENT: entropy minimisation."""

    loss_function = staticmethod(entropy)


class NumpyPseudoLabel(_AffineMethod):
    """Cross-entropy with the network's own most probable class."""

    loss_function = staticmethod(pseudo_label)


# ---------------------------------------------------------------- metrics: probabilities [N, classes], labels [N]


def error(probs, labels):
    return float((probs.argmax(axis=1) != labels).mean())


def nll(probs, labels):
    return float(-np.log(probs[np.arange(len(labels)), labels]).mean())


def brier(probs, labels):
    return float(((probs - np.eye(probs.shape[1])[labels]) ** 2).sum(axis=1).mean())


def ece(probs, labels, bins=15, closed="right"):
    """Expected calibration error of the most probable class over equal-width bins.

    closed="right": bins (lo, hi], as Guo et al. (2017). closed="left": bins [lo, hi) and one more for a confidence of
    exactly 1, as torchmetrics 1.9 has it. They differ only where a confidence is an edge.
    """
    if closed not in ("right", "left"):
        raise ValueError(f"no such variant: {closed=}")
    confidence, correct = probs.max(axis=1), probs.argmax(axis=1) == labels
    edges = np.linspace(0, 1, bins + 1)
    total = 0.0
    for i in range(bins + (closed == "left")):
        if closed == "right":
            inside = (confidence > edges[i]) & (confidence <= edges[i + 1])
        else:
            inside = (confidence >= edges[i]) & (confidence < (*edges, np.inf)[i + 1])
        if inside.any():
            total += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    return float(total)
