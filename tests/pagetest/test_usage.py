"""Front matter, and what it asks of a page: usage first, checks apart, the loop in sight."""

import pytest

from pagetest.checks.parity import compare_structure
from pagetest.checks.rules import check_page
from pagetest.model.page import CHECK, FIGURE, FILE, RUN, USAGE
from pagetest.model.script import make_script

FRONT = "---\nkind: {}\noutcome: {}\nminutes: 10\ndevices: cpu, cuda\n---\n"
COMMAND = "\n<!-- doc-test-command: python lesson.py -->\n"
USES = "\n".join(f"x{number} = {number}" for number in range(9))


def page(*blocks: str, kind: str = "how-to") -> str:
    fences = "\n".join(f"```{block}\n```\n" for block in blocks)
    return FRONT.format(kind, "Train your model") + f"# Title\n\n{fences}{COMMAND}"


def faults(parse, text: str) -> list[tuple[int, str]]:
    parsed = parse(text)
    return [(finding.line, finding.message) for finding in check_page(parsed, make_script(parsed))]


# ------------------------------------------------------------------------------------------ front matter


def test_front_matter_is_read_and_is_no_prose(parse) -> None:
    read = parse(FRONT.format("tutorial", "Train a model on two GPUs") + "# Title\n\nText.\n")
    assert (read.front.kind, read.front.outcome) == ("tutorial", "Train a model on two GPUs")
    assert (read.front.minutes, read.front.devices, read.front.end) == (10, ("cpu", "cuda"), 6)
    assert [heading.line for heading in read.headings] == [7]
    assert read.body[:7] == ("",) * 6 + ("# Title",)
    assert len(read.body) == len(read.lines)
    assert not read.findings
    assert parse("# Title\n").front is None
    assert parse("# Title\n").body == ("# Title", "")


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        (
            "kind: tutorial",
            "kind: lesson",
            2,
            "`kind` of the front matter is one of tutorial, how-to, concept, internals",
        ),
        ("minutes: 10", "minutes: ten", 4, "`minutes` of the front matter is an integer"),
        ("devices: cpu, cuda", "devices: cpu, gpu", 5, "`devices` of the front matter is a list of cpu, cuda"),
        ("outcome: Train", "outcome: Train: all", 3, "`outcome` of the front matter is a sentence without `: `"),
        ("outcome: Train", "outcome: 'Train", 3, "that begins with a letter"),
        ("minutes: 10\n", "", 1, "the front matter lacks minutes"),
        ("minutes: 10\n", "minutes: 10\nminutes: 11\n", 5, "has a line `key: value` for each of"),
        ("minutes: 10\n", "author: me\n", 4, "correct `author: me`"),
    ],
)
def test_front_matter_that_cannot_be_used_is_refused(parse, old, new, line, message) -> None:
    text = FRONT.format("tutorial", "Train a model") + "# Title\n"
    found = parse(text.replace(old, new)).findings
    assert any(one.line == line and message in one.message for one in found), found


def test_a_translation_has_the_same_kind_time_and_devices_and_its_own_outcome(parse) -> None:
    original = parse(page(f"python\n{USES}"))
    translated = page(f"python\n{USES}").replace("Train your model", "训练你的模型")
    assert compare_structure(original, parse(translated, language="zh-Hans")).same_code
    for change in (("how-to", "tutorial"), ("minutes: 10", "minutes: 9"), ("cpu, cuda", "cpu")):
        found = compare_structure(original, parse(translated.replace(*change), language="zh-Hans")).findings
        assert [one.message.partition(" that")[0] for one in found] == ["the first kind, reading time or devices"]


# ------------------------------------------------------------------------------------------ roles


def test_the_role_of_a_block_is_what_its_fence_says(parse) -> None:
    blocks = ("python\nx = 1", "python check\nassert x", "python figure\ny = x", "python file=a/B.py\nz = 1")
    read = parse(page(*blocks, "shell run\npython a/B.py", "shell\nls", "text\nx"))
    assert [block.role for block in read.blocks] == [USAGE, CHECK, FIGURE, FILE, RUN, "", ""]
    assert read.blocks[3].file == "a/B.py"
    assert [block.role for block in read.runnable] == [USAGE, CHECK, FIGURE]
    assert [block.role for block in read.executed] == [USAGE, CHECK, FIGURE, RUN]


# ------------------------------------------------------------------------------------------ usage


@pytest.mark.parametrize(
    "checks",
    [
        "assert x1",
        "torch.testing.assert_close(x1, x2)",
        "if torch.equal(x1, x2):\n    x3 = 1",
        "with expect_error(ValueError):\n    pass",
        "import matplotlib.pyplot as plt\nplt.plot(x1)",
        "from matplotlib import pyplot as plt\nfigure, axes = plt.subplots()\naxes.plot(x1)",
        "def unused_by_usage(x):\n    return x",
        "def helper(x):\n    assert x\n\n\nhelper(x1)",
    ],
)
def test_a_how_to_keeps_its_checks_and_figures_out_of_its_usage(parse, checks) -> None:
    few = "\n".join(f"y{number} = 1" for number in range(40))
    text = page(f"python\n{USES}\n{few}\n{checks}", "python check\nassert 1 + x1")
    assert not faults(parse, text), "a tenth of the lines may do so"
    text = page(f"python\n{USES}\n{checks}\n{checks}")
    (found,) = faults(parse, text)
    assert "lines in `python` blocks check or draw" in found[1]
    assert not faults(parse, page(f"python\n{USES}\n{checks}\n{checks}", kind="concept"))
    assert not faults(parse, page(f"python\n{USES}", f"python check\n{checks}"))


def test_the_methods_of_a_class_that_usage_makes_are_usage(parse) -> None:
    methods = "    def __init__(self):\n        x = 1\n\n    def forward(self, x):\n        return x\n"
    model = f"class Net(Base):\n{methods}\n\nNet()"
    assert not faults(parse, page(f"python\n{model}"))
    assert faults(parse, page(f"python\n{USES}\n{model.removesuffix('Net()')}", "python check\nassert Net()"))


def test_half_of_all_code_is_usage(parse) -> None:
    assert not faults(parse, page(f"python\n{USES}", "python check\n" + "assert x1\n" * 9))
    found = faults(
        parse, page(f"python\n{USES}", "python check\n" + "assert x1\n" * 5, "python figure\n" + "x1 = 2\n" * 5)
    )
    assert found == [
        (1, "9 of 19 lines of code are usage, at least half must be: move checks to an internals page or to tests")
    ]
    more = "shell run\npython a.py"
    assert not faults(
        parse, page("python file=a.py\nx = 1\ny = 2", more, f"python\n{USES}", "python check\n" + "assert x1\n" * 12)
    )


def test_the_first_usage_is_on_the_first_screen(parse) -> None:
    text = page(f"python\n{USES}")
    assert not faults(parse, text.replace("# Title\n", "# Title\n" + "\ntext" * 49))
    found = faults(parse, text.replace("# Title\n", "# Title\n" + "\ntext" * 53))
    assert found == [(63, "the first usage stands below line 60: show what the page is for on the first screen")]
    late = page("python check\nx = 1\nassert x", f"python\n{USES}").replace("```python\n", "\n" * 60 + "```python\n")
    assert "the first usage stands below line 60" in faults(parse, late)[0][1]


def test_a_how_to_is_short(parse) -> None:
    text = page(f"python\n{USES}") + "\ntext" * 300
    assert [line for line, message in faults(parse, text) if "a how-to has at most 300 lines" in message] == [300]
    assert not faults(parse, text.replace("how-to", "tutorial"))


LOOP = "for x in range(3):\n    booster.backward(x, optimizer)"


def test_a_page_that_trains_shows_its_loop(parse) -> None:
    hidden = "def train():\n    booster.backward(1, optimizer)\n\n\ntrain()"
    assert not faults(parse, page(f"python\n{USES}\n{LOOP}"))
    assert not faults(parse, page(f"python\n{USES}\n{LOOP}\n{hidden}"))
    found = faults(parse, page(f"python\n{USES}\n{hidden}"))
    assert found == [(20, "the training loop stands inside a function only: show it once at top level")]
    run = "shell run\npython train.py"
    assert not faults(parse, page(f"python file=train.py\n{LOOP}", run, f"python\n{USES}"))
    assert (
        "stands inside a function only"
        in faults(parse, page(f"python file=train.py\n{hidden}", run, f"python\n{USES}"))[0][1]
    )
