"""Which functions of a library communicate is found in its source alone."""

import pytest

from pagebuild.api.communication import CommunicationGraph
from pagebuild.api.library import Library

pytestmark = pytest.mark.slow


HEAD = "import torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel\n"
SENDER = "class Sender:\n    def send(self): dist.barrier()\n"
TALKING = {
    "a collective": "def run(): dist.all_reduce(x)",
    "a collective that is passed on": "def run(): return map(dist.broadcast, xs)",
    "a world that is formed": "def run(): dist.init_process_group()",
    "a wrapper that reduces": "def run(): return DistributedDataParallel(x)",
    "a function of the module": "def inner(): dist.barrier()\ndef run(): inner()",
    "a function that is passed on": "def inner(): dist.barrier()\ndef run(): return apply(inner)",
    "a lambda": "def inner(): dist.barrier()\ndef run(): return lambda: inner()",
    "a function of another module": "from tinylib.other import talk\ndef run(): talk()",
    "a function that a package passes on": "from tinylib.pack import talk\ndef run(): talk()",
    "another name of a collective": "reduce = getattr(dist, 'x', None) or dist.all_reduce\ndef run(): reduce(x)",
    "another name of a function": "def inner(): dist.barrier()\nouter = inner\ndef run(): outer()",
    "a method of an argument": SENDER + "def run(sender: Sender | None): sender.send()",
    "a method of an argument, quoted": SENDER + "def run(sender: 'Sender'): sender.send()",
    "a method of a new object": SENDER + "def run(): Sender().send()",
    "a method of a variable": SENDER + "def run(flag):\n    sender = None if flag else Sender()\n    sender.send()",
    "a method of a result": SENDER + "def make() -> Sender: ...\ndef run(): make().send()",
    "a method of a field": SENDER + "class Holder:\n    sender: Sender\ndef run(holder: Holder): holder.sender.send()",
    "a method of a property": (
        SENDER
        + "class Holder:\n    @property\n    def it(self) -> Sender: ...\ndef run(holder: Holder): holder.it.send()"
    ),
    "a method of what the constructor was given": (
        SENDER + "class Holder:\n    def __init__(self, sender: Sender | None):\n        self.it = sender or Sender()\n"
        "    def go(self): self.it.send()\ndef run(holder: Holder): holder.go()"
    ),
    "a method of what the constructor makes out of itself": (
        SENDER + "class Holder:\n    def __init__(self, sender: Sender):\n        parts = self.parts.copy()\n"
        "        self.it = sender\n        self.parts = parts.copy()\n"
        "    def go(self): self.it.send()\ndef run(holder: Holder): holder.go()"
    ),
    "a method of an heir": (
        "class Base:\n    def send(self): ...\nclass Heir(Base):\n    def send(self): dist.barrier()\n"
        "def run(base: Base): base.send()"
    ),
    "an inherited method": SENDER + "class Heir(Sender): ...\ndef run(heir: Heir): heir.send()",
    "a constructor": "class Maker:\n    def __init__(self): dist.barrier()\ndef run(): Maker()",
}
SILENT = {
    "a question": "def run(): return dist.get_rank()",
    "a wrapper that is asked about": "def run(x): return isinstance(x, DistributedDataParallel)",
    "a method of the same name": SENDER + "class Quiet:\n    def send(self): ...\ndef run(quiet: Quiet): quiet.send()",
    "a namesake of another library": "import functools\ndef run(): functools.reduce(f, xs)",
    "a string": "def run(): return 'dist.barrier()'",
}


def communicates(source: str, make_library) -> bool:
    library: Library = make_library(
        {
            "run.py": HEAD + source,
            "other.py": HEAD + "def talk(): dist.barrier()\n",
            "pack/__init__.py": "from tinylib.pack.deep import talk\n",
            "pack/deep.py": HEAD + "def talk(): dist.barrier()\n",
        }
    )
    return "tinylib.run.run" in CommunicationGraph(library).communicating


@pytest.mark.parametrize("case", TALKING)
def test_finds_what_communicates(case, make_library) -> None:
    assert communicates(TALKING[case], make_library)


@pytest.mark.parametrize("case", SILENT)
def test_lets_everything_else_pass(case, make_library) -> None:
    assert not communicates(SILENT[case], make_library)


def test_a_class_communicates_if_its_constructor_does(make_library) -> None:
    source = HEAD + "class Maker:\n    def __post_init__(self): dist.barrier()\n"
    assert "tinylib.run.Maker" in CommunicationGraph(make_library({"run.py": source})).communicating


def test_the_verbs_of_the_booster_are_followed_down_to_the_collectives(inventory) -> None:
    talking = CommunicationGraph(inventory.resolver.library).communicating
    assert "colossal._src.booster.booster.Booster.boost" in talking  # by the plugin's DistributedDataParallel
    assert (
        "colossal._src.booster.checkpoint_mixin.CheckpointMixin.save_model" in talking
    )  # by all_gather_object of the writers
    assert "colossal._src.comm.ops.gather" in talking
    assert "colossal._src.booster.booster.Booster.backward" not in talking  # torch's own hooks: nothing in our source
    assert "colossal._src.comm.channel.Channel.split" not in talking
    assert "colossal._src.interface.model.ModelWrapper.unwrap" not in talking
