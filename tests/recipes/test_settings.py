import pytest

from petal import ConfigError, FanIn, Fisher, PosteriorRates, Stochastic, Views
from petal.methods import METHODS
from petal.recipes import RECIPES, SGD, TABLE_1, WRAPPERS, Adam, apply_settings, parse_value, pick_rows, recipe, rows
from petal.recipes.settings import as_json


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.99", 0.99),
        ("1e-9", 1e-9),
        ("32", 32),
        ("-1", -1),
        ("None", None),
        ("none", None),
        ("True", True),
        ("sample", "sample"),
        ("symmetric", "symmetric"),
        ("Fisher(0.01)", Fisher(0.01)),
        ("fisher(quantile=0.01)", Fisher(0.01)),
        ("Stochastic(0.02)", Stochastic(0.02)),
        ("Views(flip=0, degrees=(-5, 5))", Views(flip=0, degrees=(-5, 5))),
        ("SGD(momentum=0.9, nesterov=True)", SGD(0.9, True)),
        ("FanIn()", FanIn()),
        ("FanIn(2.3, most=2e-3)", FanIn(2.3, 2e-3)),
        ("cross-entropy", "cross-entropy"),
    ],
)
def test_values(text: str, value: object) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize(
    "text", ["__import__('os').getcwd()", "open('x')", "Fisher(open('x'))", "Fisher(2.0)", "Fisher(x=1)", "exit()"]
)
def test_nothing_is_evaluated(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_value(text)


@pytest.mark.parametrize("value", [FanIn(2.3), Fisher(0.01), Stochastic(0.02), SGD(0.9, True), Adam(), Views(flip=0.0)])
def test_json_reads_back(value: object) -> None:
    assert parse_value(as_json(value)) == value


def test_settings_reach_the_rows_of_a_method() -> None:
    known = rows(recipe("cifar10"))
    changed = apply_settings(known, ["petal.ema=0.5", "petal.restore=Fisher(0.2)", "petal-sres.views=3", "tent.lr=1"])
    averages = [changed[name].options["ema"] for name in ("petal", "petal-sres", "petal-none", "cotta")]
    assert averages == [0.5, 0.5, 0.5, 0.999]
    assert changed["petal"].options["restore"] == Fisher(0.2)
    assert changed["petal-sres"].options["restore"] == Stochastic(0.01)  # what makes the row stays
    assert changed["petal-none"].options["restore"] is None
    assert (changed["petal-sres"].options["views"], changed["petal"].options["views"]) == (3, 32)
    assert changed["tent"].options["lr"] == changed["tent-online"].options["lr"] == 1.0
    assert isinstance(changed["tent"].options["lr"], float)
    assert known["petal"].options["ema"] == 0.999
    assert apply_settings(known, ["tent.lr=FanIn()"])["tent"].options["lr"] == FanIn()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("petl.ema=0.9", "did you mean petal"),
        ("petal.emma=0.9", "did you mean ema"),
        ("petal.ema", "METHOD.OPTION=VALUE"),
        ("petal.ema=fast", "takes float"),
        ("petal.views=2.5", "takes int"),
        ("petal.views=true", "takes int"),
        ("petal.episodic=3", "takes bool"),
        ("petal.restore=0.03", r"Fisher\(...\), Stochastic\(...\), none"),
        ("petal.optimizer=adam", r"SGD\(...\)"),
        ("petal.seed=3", "no setting"),
        ("source.lr=1", "has no settings"),
    ],
)
def test_helpful_errors(setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        apply_settings(rows(recipe("cifar10")), [setting])


@pytest.mark.parametrize("name", list(RECIPES))
@pytest.mark.parametrize("fidelity", ["official", "paper"])
def test_every_row_is_of_a_method_and_its_own_options(name: str, fidelity: str) -> None:
    known = rows(recipe(name), fidelity)
    assert set(TABLE_1) <= set(known)
    from petal.recipes.settings import options_of

    for row in known.values():
        assert set(row.options) <= set(options_of(METHODS[row.method])), row.name


def test_published_numbers() -> None:
    """Against the paper's and the released code's, written out by hand."""
    expected = {
        "cifar10": (200, 0.92, 1e-9, 0.03, 0.01, "cross-entropy"),
        "cifar10-gradual": (200, 0.92, 1e-9, 0.03, 0.01, "cross-entropy"),
        "cifar100": (200, 0.72, 1e-9, 0.03, 0.01, "cross-entropy"),
        "imagenet": (64, 0.1, 1e-11, 0.003, 0.001, "symmetric"),
        "imagenet-3dcc": (64, 0.1, 1e-10, 0.003, 0.001, "symmetric"),
    }
    for name, (batch, tau, alpha, delta, p, loss) in expected.items():
        chosen = recipe(name)
        official, paper = rows(chosen, "official"), rows(chosen, "paper")
        fim = official["petal"].options
        assert (chosen.batch_size, fim["confidence"], fim["prior_weight"], fim["loss"]) == (batch, tau, alpha, loss)
        assert (fim["gate"], fim["average"], fim["views"], fim["ema"]) == ("batch", "logits", 32, 0.999)
        assert fim["restore"] == Fisher(delta)
        assert official["cotta"].options["restore"] == official["petal-sres"].options["restore"] == Stochastic(p)
        text = paper["petal"].options
        assert (text["gate"], text["average"], text["loss"]) == ("sample", "probs", "cross-entropy")
    assert rows(recipe("imagenet"))["petal"].options["optimizer"] == SGD(0.9, True)
    assert recipe("imagenet").fit.swag_snapshots == 4
    with pytest.raises(ConfigError, match="did you mean cifar10"):
        recipe("cifar_10")
    with pytest.raises(ConfigError, match="no fidelity"):
        rows(recipe("cifar10"), "released")


def test_a_number_or_a_word() -> None:
    """PETAL's confidence is a number or "auto", its rates a number or a rule."""
    known = rows(recipe("digits"))
    for text, value in (("0.5", 0.5), ("1", 1.0), ("auto", "auto")):
        assert apply_settings(known, [f"petal.confidence={text}"])["petal"].options["confidence"] == value
    rule = apply_settings(known, ["petal-f.lr=PosteriorRates(0.3)"])["petal-f"].options["lr"]
    assert (rule, parse_value(as_json(rule))) == (PosteriorRates(0.3), PosteriorRates(0.3))


def test_what_goes_around_a_method() -> None:
    known = apply_settings(rows(recipe("cifar10")), ["guard.window=700", "small.own=0.5", "guard.policy=soften"], WRAPPERS)
    (row,) = pick_rows(known, ["petal-sres+small+guard", "petal-sres+small+guard"])
    assert (row.method, row.wraps, row.label) == ("petal", ("small", "guard"), "PETAL (S-Res) + small + guard")
    assert row.wrapper_options == {"guard": {"window": 700, "policy": "soften"}, "small": {"own": 0.5}}
    assert row.options["restore"] == Stochastic(0.01)
    assert pick_rows(known, ["petal"])[0].wraps == ()
    first, second = pick_rows(known, ["eta+asr+small", "eta+reservoir"])
    assert (first.label, first.random, first.wraps) == ("ETA + ASR + small", False, ("asr", "small"))
    assert (second.label, second.random) == ("ETA + ReservoirTTA", True)        # its sample of styles is drawn
    plain = known["roid-plain"].options
    assert (plain["consistency"], plain["answer"]) == (0.0, "logits")
    for name, words in (
        ("petal+gard", "did you mean .*guard"),
        ("petl+guard", "did you mean petal"),
        ("petal+guard+small", r"from the inside out: petal\+small\+guard"),
        ("petal+guard+guard", "given once"),
    ):
        with pytest.raises(ConfigError, match=words):
            pick_rows(known, [name])
    wrong = (("guard.windows=3", "did you mean window"), ("guard.window=x", "takes int"), ("gard.x=1", "guard"))
    for setting, words in wrong:
        with pytest.raises(ConfigError, match=words):
            apply_settings(rows(recipe("cifar10")), [setting], WRAPPERS)
