"""Zero-bubble programs with nodes that they compute themselves train as one process does."""

import copy
import dataclasses
import importlib
from typing import Any

import pytest
import torch
from divided import whole_parameters
from equality import assert_equal
from families import LENGTH, build
from float64 import KeepFloat64
from torch import nn

from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin, plan_step
from colossal.errors import ConfigError
from colossal.legacy.booster import MoeHybridParallelPlugin
from colossal.legacy.cluster import ProcessGroupMesh
from colossal.legacy.pipeline import GridStageManager, PipelineGraph, ScheduledNode, ZeroBubbleVPipeScheduler
from colossal.pipeline import Costs, StagePlacement, simulate, zero_bubble_v
from colossal.testing import fake_world, run_processes

OLDER: Any = importlib.import_module("colossal.booster.plugin.moe_hybrid_parallel_plugin")
BATCH, MICRO, STEPS = 8, 4, 3
V: dict[str, Any] = {"num_microbatches": MICRO, "pp_style": "zbv", "num_model_chunks": 2, "precision": "fp32"}


def nodes_of(order: str, pp_size: int) -> Any:
    """The nodes of the older page, with the memory of a layer of transformers; or an order of the program's own."""
    hidden, heads, length = 64, 4, LENGTH
    forward, weights = 34 * hidden + 5 * heads * length, -32 * hidden
    graph = PipelineGraph(
        n_stage=pp_size,
        n_micro=MICRO,
        f_cost=1000,
        b_cost=1000 if order != "by costs" else 2500,
        w_cost=1000 if order != "by costs" else 400,
        c_cost=1,
        f_mem=forward,
        b_mem=-forward - weights,
        w_mem=weights,
        max_mem=forward * (pp_size * 2 + 1),
    )
    nodes: Any = graph.get_v_schedule()
    if order == "of actions":
        return zero_bubble_v(StagePlacement(pp_size, 2, is_v=True), MICRO, Costs(2, 3, 1))
    if order != "reversed":
        return nodes
    return [[dataclasses.replace(node, minibatch=MICRO - 1 - node.minibatch) for node in each] for each in nodes]


def ids_of(step: int) -> torch.Tensor:
    return torch.randint(64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_of(outputs: Any, _batch: Any = None) -> torch.Tensor:
    return outputs.loss


def train(order: str, name: str, kind: type[HybridParallelPlugin], options: dict[str, Any]) -> dict[str, Any]:
    nodes, num_layers = nodes_of(order, options["pp_size"]), 2 * options["pp_size"]
    plugin = kind(scheduler_nodes=nodes, initial_scale=1, find_unused_parameters=True, max_norm=0.05, **V, **options)
    booster, model = Booster(plugin=plugin), build(name, num_layers=num_layers)
    with KeepFloat64():
        boosted, optimizer, criterion, *_ = booster.boost(
            model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), loss_of
        )
        assert optimizer is not None
        losses, rank = [], plugin.data_parallel_rank_and_size()[0]
        for step in range(STEPS):
            ids = ids_of(step).chunk(plugin.dp_size)[rank]
            data = iter([{"input_ids": ids, "labels": ids}])
            done = booster.execute_pipeline(
                data, boosted, criterion, optimizer, return_loss=True, return_outputs=step == 0
            )
            if step == 0:
                outputs = None if done["outputs"] is None else done["outputs"].logits
            losses.append(done["loss"])
            optimizer.step()
            optimizer.zero_grad()
    values = whole_parameters(boosted.unwrap(), plugin.mesh)
    return {"losses": losses, "values": values, "outputs": outputs, "replica": rank}


def one_process(name: str, num_parts: int, num_layers: int) -> dict[str, Any]:
    """Losses of each part of a batch, the logits of the first batch, and the parameters after all steps."""
    model = build(name, num_layers=num_layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses, logits = [], []
    with KeepFloat64():
        for step in range(STEPS):
            parts = []
            for ids in ids_of(step).chunk(num_parts):
                outputs = model(input_ids=ids, labels=ids)
                (outputs.loss / num_parts).backward()
                parts.append(outputs.loss.detach())
                if step == 0:
                    logits.append(outputs.logits.detach())
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(parts)
    return {
        "losses": losses,
        "logits": torch.cat(logits),
        "values": dict(model.named_parameters(remove_duplicate=False)),
    }


TIED = "llama-tied"
PP2: dict[str, Any] = {"tp_size": 1, "pp_size": 2}
MOE = PP2 | {"ep_size": 2}


@pytest.mark.parametrize(
    ("order", "name", "kind", "size", "options"),
    [
        ("reversed", TIED, HybridParallelPlugin, 2, PP2),
        pytest.param("of actions", TIED, HybridParallelPlugin, 2, PP2, marks=pytest.mark.slow),
        pytest.param("of the page", TIED, OLDER.HybridParallelPlugin, 2, PP2, marks=pytest.mark.slow),
        pytest.param("by costs", TIED, HybridParallelPlugin, 4, PP2 | {"pp_size": 4}, marks=pytest.mark.slow),
        pytest.param("by costs", "llama", HybridParallelPlugin, 4, PP2 | {"tp_size": 2}, marks=pytest.mark.slow),
        pytest.param("reversed", TIED, HybridParallelPlugin, 4, PP2 | {"zero_stage": 1}, marks=pytest.mark.slow),
        pytest.param("of the page", "mixtral", MoeHybridParallelPlugin, 4, MOE, marks=pytest.mark.slow),
    ],
)
def test_nodes_of_a_program_train_as_one_process(
    order: str, name: str, kind: type[HybridParallelPlugin], size: int, options: dict[str, Any]
) -> None:
    ranks = run_processes(train, size, order, name, kind, options)
    replicas = size // options["pp_size"] // options["tp_size"]
    expected = one_process(name, MICRO * replicas, 2 * options["pp_size"])
    for rank in ranks:
        for step, losses in enumerate(expected["losses"]):
            own = losses[rank["replica"] * MICRO :][:MICRO]
            assert_equal(rank["losses"][step], torch.stack(own).mean(), f"loss of step {step}")
        for key, value in rank["values"].items():
            assert_equal(value, expected["values"][key].detach(), key)
        if rank["outputs"] is not None and options["tp_size"] == 1:
            logits = expected["logits"].chunk(replicas)[rank["replica"]]
            assert_equal(rank["outputs"], logits, "outputs, in the order of the batch")
    assert {key for rank in ranks for key in rank["values"]} == expected["values"].keys()


@pytest.mark.parametrize("pp_size", [2, 4])
@pytest.mark.parametrize("costs", [(1, 3, 1, 0), (2, 1, 0.5, 1), (1, 1, 0.5, 0.3)])
def test_costs_choose_an_order_that_ends_before_the_one_for_equal_costs(pp_size: int, costs: Any) -> None:
    placement = StagePlacement(pp_size, 2, is_v=True)
    graph: Any = PipelineGraph(pp_size, MICRO, *costs, f_mem=2, b_mem=-1, w_mem=-1)
    even = simulate(zero_bubble_v(placement, MICRO), placement, Costs(*costs))
    assert graph.get_v_schedule(only_run_time=True) < max(each.end for each in even)
    with fake_world(pp_size):  # it is proven to end on every backend
        HybridParallelPlugin(tp_size=1, pp_size=pp_size, scheduler_nodes=graph.get_v_schedule(), **V)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_microbatches": 8}, "one of 4, and a batch of 8"),
        ({"pp_style": "1f1b", "num_model_chunks": 1}, "Found it with pp_style='1f1b' and pp_size=2"),
        ({"scheduler_nodes": []}, "Found 0 lists"),
        ({"scheduler_nodes": nodes_of("of the page", 2)[0]}, "Found 24 elements, the first a ScheduledNode"),
        ({"scheduler_nodes": nodes_of("of the page", 4)}, "Found 4 lists"),
        ({"scheduler_nodes": [[], []]}, "Found one of 0"),
        ({"scheduler_nodes": [[ScheduledNode("X", 0, 0, 0)], []]}, "Found ScheduledNode"),
        ({"scheduler_nodes": [[ScheduledNode("F", 2, 0, 0)], []]}, "of the 2 chunks"),
        ({"scheduler_nodes": [[ScheduledNode("F", 0, 0, 0)], []]}, "once"),
        ({"scheduler_nodes": zero_bubble_v(StagePlacement(2, 2), MICRO)}, "passes of its own stages"),
    ],
)
def test_nodes_that_are_no_schedule_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"scheduler_nodes": nodes_of("of the page", 2), **V, **PP2}
    with fake_world(2), pytest.raises(ConfigError, match=message):
        HybridParallelPlugin(**given | options)


def run_other_orders() -> None:
    nodes = nodes_of("reversed" if torch.distributed.get_rank() else "of the page", 2)
    booster = Booster(plugin=HybridParallelPlugin(scheduler_nodes=nodes, **V, **PP2))
    model = build("llama", num_layers=4)
    with pytest.raises(ConfigError, match=r"differ in the plugin .*GivenSchedule\(num_microbatches=4, digest="):
        booster.boost(model, torch.optim.SGD(model.parameters()), loss_of)


def run_other_orders_without_a_plugin() -> None:
    nodes = nodes_of("reversed" if torch.distributed.get_rank() else "of the page", 2)
    manager = GridStageManager(ProcessGroupMesh(2), 0, use_zbv=True, num_model_chunks=2)
    schedule = ZeroBubbleVPipeScheduler(manager, nodes, 2, num_microbatch=MICRO)
    chunks, data = [nn.Linear(2, 2), nn.Linear(2, 2)], iter([[torch.ones(BATCH, 2)]])
    with pytest.raises(ConfigError, match="or another order of passes"):
        schedule.forward_backward_step(chunks, data, loss_of, torch.optim.SGD(chunks[0].parameters()))


def run_other_number() -> None:
    options = {key: value for key, value in V.items() if key != "num_microbatches"} | {"microbatch_size": 4}
    booster = Booster(plugin=HybridParallelPlugin(scheduler_nodes=nodes_of("of the page", 2), **options, **PP2))
    model = build("llama", num_layers=4)
    model, optimizer, criterion, *_ = booster.boost(model, torch.optim.SGD(model.parameters()), loss_of)
    ids = ids_of(0)
    with pytest.raises(ConfigError, match="one of 4, and a batch of 2"):
        booster.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), model, criterion, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("program", [run_other_orders, run_other_orders_without_a_plugin, run_other_number])
def test_no_rank_waits_where_orders_differ_or_do_not_fit(program: Any) -> None:
    run_processes(program, 2)


def test_a_plan_counts_the_passes_in_flight_of_the_given_order() -> None:
    passes = ("F0", "F1", "B1", "B0", "W1", "W0")
    one_by_one = [
        [ScheduledNode(each[0], int(each[1]), rank, number) for number in range(MICRO) for each in passes]
        for rank in range(2)
    ]
    ids, found = ids_of(0), []
    for nodes in (None, one_by_one):
        with fake_world(2):
            model = copy.deepcopy(build("llama", num_layers=4).float()).to("meta")
            plugin = HybridParallelPlugin(scheduler_nodes=nodes, **V, **PP2)
            batch = {"input_ids": ids, "labels": ids}
            plan = plan_step(plugin, model, torch.optim.AdamW(model.parameters()), batch, loss_of)
        found.append((plan.num_in_flight, plan.activation_bytes))
    assert found[1][0] == 2 < found[0][0]
    assert found[1][1] < found[0][1]
