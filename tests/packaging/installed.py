"""Train with an installed copy of the library, and ask `colossal check` whether its own code came with it.

python installed.py {"first use",install,none}

It runs in a folder that is not the clone, by the Python that the copy is installed for; the argument is what the check
must say of the extensions in C++.
"""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path


def train() -> None:
    """Be a rank: shared optimizer states, the library's own Adam, and a checkpoint."""
    import torch

    import colossal
    from colossal.booster import Booster
    from colossal.booster.plugin import LowLevelZeroPlugin
    from colossal.nn.optimizer import HybridAdam

    colossal.launch_from_torch(verbose=False)
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    targets = inputs.sum(dim=1, keepdim=True)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    booster = Booster(plugin=LowLevelZeroPlugin(precision="fp32"))
    model, optimizer, criterion, *_ = booster.boost(net, HybridAdam(net.parameters(), lr=1e-2), torch.nn.MSELoss())
    losses = []
    for _ in range(40):
        loss = criterion(model(inputs), targets)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0], losses
    booster.save_model(model, "model.pt")
    expected = model(inputs)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    booster.load_model(model, "model.pt")
    assert torch.equal(model(inputs), expected)
    if torch.distributed.get_rank() == 0:
        print(f"trained on 2 ranks: loss {losses[0]:.3f} to {losses[-1]:.4f}")


def check(extensions: str) -> None:
    """Train on two ranks, and look at the machine as a user would."""
    import colossal

    assert Path(colossal.__file__).is_relative_to(sys.prefix), f"{colossal.__file__} is not the installed copy"
    assert metadata.version("colossal") == colossal.__version__
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLOSSAL_DEVICE": "cpu"}
    subprocess.run([*torchrun, __file__, "train"], env=environment, check=True)
    command = [str(Path(sys.executable).with_name("colossal")), "check", "-i", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    found = rows["extensions in C++"]
    assert str(found["value"]).lower() == extensions, found
    assert rows["one-pass Adam"]["value"] is (extensions != "none"), rows["one-pass Adam"]
    print(f"colossal {colossal.__version__} check: usable; extensions in C++ {found['found']}")


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train()
    else:
        check(sys.argv[1])
