"""The loop of the programs: train, evaluate, log, save, resume."""

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any, final

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import Dataset

from colossal.accelerator import get_current_device
from colossal.booster import Booster
from colossal.cluster import DistCoordinator
from colossal.errors import ConfigError, NonFiniteError
from colossal.nn.lr_scheduler import CosineAnnealingWarmupLR
from examples.common.options import PLUGINS, num_microbatches
from examples.common.report import open_log, open_profiler, peak_memory, utilization
from examples.common.settings import check_settings, save_settings

Batch = dict[str, torch.Tensor]


def make_booster(options: argparse.Namespace) -> Booster:
    """Make the booster that the options ask for."""
    return Booster(
        plugin=PLUGINS[options.plugin](options), mixed_precision=options.precision, max_norm=options.max_norm
    )


def make_loaders(
    options: argparse.Namespace,
    booster: Booster,
    train_set: Dataset[Any],
    test_set: Dataset[Any],
    *,
    num_samples: int,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Make the loaders of both datasets.

    Args:
        options: The command line.
        booster: The booster.
        train_set: What is trained on, in a new order in each epoch.
        test_set: What is evaluated; its length is a multiple of the batch size.
        num_samples: Samples to train on, without those that only fill up a batch.
        **kwargs: Passed to `torch.utils.data.DataLoader`.

    Returns:
        Loaders of what a rank computes in a step.
    """
    num_replicas, micro = booster.plugin.data_parallel_rank_and_size()[1], num_microbatches(options)
    size = options.batch_size // (num_replicas * options.accumulate)
    if options.batch_size % (num_replicas * options.accumulate * micro) or num_samples < options.batch_size:
        times = f"times --accumulate {options.accumulate}" + f" times {micro} micro-batches" * (options.pp > 1)
        raise ConfigError(
            f"--batch-size must be a multiple of {num_replicas} replicas {times}, and at most the {num_samples} "
            f"samples to train on. Found {options.batch_size}."
        )
    loader, tests = (
        booster.plugin.prepare_dataloader(
            samples,
            size * options.accumulate,
            shuffle=is_training,
            seed=options.seed,
            drop_last=is_training,
            num_workers=options.workers,
            **kwargs,
        )
        for samples, is_training in ((train_set, True), (test_set, False))
    )
    return loader, tests


@final
class Training:
    """A boosted model, its data, and the loop that trains it.

    Args:
        options: The command line.
        booster: That of `make_booster`.
        model: The model, not boosted, as `LazyInitContext` builds it.
        optimizer: That of its parameters.
        loaders: Those of `make_loaders`.
        causal: Whether the model predicts each label from the tokens before it.
        unit: What speed counts, ``"tokens"`` or ``"images"``.
        flops_per_unit: Operations of a step for each of them.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        booster: Booster,
        model: Any,
        optimizer: torch.optim.Optimizer,
        loaders: tuple[Any, Any],
        *,
        causal: bool = True,
        unit: str = "tokens",
        flops_per_unit: float,
    ) -> None:
        self.options, self.booster, self.tests = options, booster, loaders[1]
        self.causal, self.unit, self.flops_per_unit = causal, unit, flops_per_unit
        model.train()  # from_pretrained returns it in evaluation mode
        if options.checkpoint_layers:
            # transformers renamed it; of adapters, the model that they adapt has it
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        if options.compile:
            model.compile()
        warmup = options.steps // 10 if options.warmup is None else options.warmup
        scheduler = CosineAnnealingWarmupLR(optimizer, options.steps, warmup_steps=warmup)
        boosted: Any = booster.boost(model, optimizer, None, loaders[0], scheduler)
        self.model, self.optimizer, _, self.loader, self.scheduler = boosted
        torch.manual_seed(options.seed + booster.plugin.data_parallel_rank_and_size()[0])  # of dropout

    def run_batch(self, batch: Batch, optimizer: Any = None) -> tuple[float, int, int]:
        """Compute the loss of a batch, and with an optimizer its gradients.

        Args:
            batch: That of this rank.
            optimizer: The boosted optimizer.

        Returns:
            The mean loss of all labels of all ranks, how many labels these are, and how many tokens or images.
        """
        size = len(batch["labels"]) // self.options.accumulate
        pieces = zip(*(tensor.split(size) for tensor in batch.values()), strict=True)
        parts = [dict(zip(batch, piece, strict=True)) for piece in pieces]
        weight = self.booster.weight_by_tokens([part["labels"] for part in parts], causal=self.causal)
        units = batch["attention_mask"].sum() if "attention_mask" in batch else batch["labels"].numel()
        sums = torch.tensor([0.0, float(units)], device=get_current_device())
        for number, part in enumerate(parts, start=1):
            # gradients are reduced once, with those of the last part
            with self.booster.no_sync(self.model) if optimizer and number < len(parts) else nullcontext():
                done = self.booster.execute_pipeline(
                    iter([part]), self.model, lambda out, inputs: weight(out.loss, inputs["labels"]), optimizer
                )
            sums[0] += done["loss"]  # a GPU is not waited for before the last part
        dist.all_reduce(sums)  # ranks of the same replica have the same
        loss, units = (sums / dist.get_world_size()).tolist()
        return loss, weight.num_labels, round(units * self.booster.plugin.data_parallel_rank_and_size()[1])

    def step(self, batch: Batch) -> dict[str, float]:
        """Train on a batch, and measure it."""
        begin = time.perf_counter()
        loss, _, units = self.run_batch(batch, self.optimizer)
        if not math.isfinite(loss):  # of all ranks, so that all of them stop
            raise NonFiniteError(
                f"The loss is {loss}. The model is as before this step, and not saved: go on from the last checkpoint "
                "with --resume and --precision fp32, or begin a run with a lower --lr and another --output."
            )
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return {"loss": loss, f"{self.unit}_per_second": units / (time.perf_counter() - begin)}

    @torch.no_grad()
    def evaluate(self) -> float:
        """Compute the mean loss of the labels that are not trained on."""
        self.model.eval()
        results = [self.run_batch(batch) for batch in self.tests]
        self.model.train()
        return sum(loss * labels for loss, labels, _ in results) / sum(labels for _, labels, _ in results)

    def train(self) -> None:
        """Train, log, evaluate and save as the options say."""
        options, show, first = self.options, DistCoordinator().print_on_master, 0
        checkpoints, parts = options.output / "checkpoints", (self.model, self.optimizer, self.scheduler)
        saved = self.booster.latest_step(checkpoints)
        if saved is not None and _goes_on(options, saved):
            check_settings(options)
            first = self.booster.load(checkpoints, *parts, dataloader=self.loader)
            show(f"goes on after step {first}")
        save_settings(options)
        log = open_log(options.report_to, options.output, first, vars(options))
        if options.compile:
            show("compiling: the first step takes up to several minutes, and so may others with new lengths")
        with open_profiler(options.output / "profile", is_on=options.profile) as profiled:
            for step, batch in enumerate(islice(_repeat(self.loader), options.steps - first), start=first + 1):
                values = self.step(batch)
                profiled()
                if options.eval_every and step % options.eval_every == 0:
                    values["eval_loss"] = self.evaluate()
                log(step, values)
                if step % max(1, options.steps // 20) == 0 or "eval_loss" in values:
                    show(self._describe(step, values))
                if options.save_every and step % options.save_every == 0:
                    self.booster.save(checkpoints, *parts, step=step, dataloader=self.loader)
        show(peak_memory())

    def _describe(self, step: int, values: dict[str, float]) -> str:
        speed = values[f"{self.unit}_per_second"]
        used = utilization(speed * self.flops_per_unit, self.options.precision)
        tested = f"  eval loss {values['eval_loss']:.4f}" if "eval_loss" in values else ""
        return f"step {step:5}  loss {values['loss']:.4f}  {speed:,.0f} {self.unit}/s{used}{tested}"

    def save(self, tokenizer: Any = None) -> None:
        """Save what `from_pretrained` loads: the model, with adapters in a folder of their own, and the tokenizer."""
        folder = self.options.output / "model"
        self.booster.save_model(self.model, folder, shard=True, use_safetensors=True)
        if tokenizer is not None and dist.get_rank() == 0:
            tokenizer.save_pretrained(folder)
        dist.barrier()


def _goes_on(options: argparse.Namespace, step: int) -> bool:
    """Whether to go on after a saved step. Two runs in one folder are refused: the older may have later checkpoints."""
    if options.smoke and not options.resume and step <= options.steps:
        return False  # a trial is repeated
    if not options.resume:
        raise ConfigError(
            f"A run begins with an --output of its own. Found checkpoints of a run up to step {step} in "
            f"{options.output}. Pass --resume to go on with it, or another --output."
        )
    if step > options.steps:
        raise ConfigError(
            f"A run goes on to --steps of at least those that it has made. Found --steps {options.steps} and a "
            f"checkpoint of step {step} in {options.output}. Pass those that it began with, or another --output."
        )
    return True


def _repeat(loader: Any) -> Iterator[Batch]:
    """Go through the data again and again, in a new order each time."""
    while True:
        if hasattr(loader.dataset, "set_epoch"):  # what it draws is drawn anew
            loader.dataset.set_epoch(loader.state_dict()["epoch"])
        yield from loader


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Let weights of layers decay, and neither biases nor norms."""
    kinds = [[each for each in model.parameters() if (each.ndim > 1) is decays] for decays in (True, False)]
    return [{"params": part, "weight_decay": decay} for part, decay in zip(kinds, (weight_decay, 0.0), strict=True)]
