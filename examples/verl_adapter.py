"""verl's single controller on `raylaunch.WorkerGroup`: the same calls, and a rank that dies is started again.

python examples/verl_adapter.py          # trains
python examples/verl_adapter.py --kill   # trains twice, and kills a rank in the second; the loss is the same

The first part stands in for `verl.single_controller.ray`: `RayResourcePool`, `RayClassWithInitArgs`, `RayWorkerGroup`
and `register`. A batch is anything that has `chunk` and `concat`, as verl's `DataProto` has. The second part uses it.
"""

import argparse
import os
import signal
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any

import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from torch.nn.parallel import DistributedDataParallel

import raylaunch
import raylaunch.worker

# The adapter.


@dataclass(frozen=True)
class Registered:
    """How a method is called. `mode`: one of verl's names."""

    mode: str
    blocking: bool
    retry: bool


def register(dispatch_mode: str = "ALL_TO_ALL", *, blocking: bool = True, retry: bool = False) -> Any:
    """Make a method of a worker one of the group. `retry`: when a rank dies, it is called again on all ranks."""

    def mark(method: Any) -> Any:
        method.registered = Registered(dispatch_mode, blocking, retry)
        return method

    return mark


class Pending:
    """What a call returns that does not block, as verl's `DataProtoFuture`."""

    def __init__(self, future: "Future[Any]", collect: Any = lambda values: values) -> None:
        self._future, self._collect = future, collect

    def get(self) -> Any:
        return self._collect(self._future.result())


@dataclass
class RayResourcePool:
    """Bundles for processes. Groups that are given the same pool share its bundles."""

    process_on_nodes: list[int]
    use_gpu: bool = True
    max_colocate_count: int = 1
    _group: Any = None

    def placement_group(self) -> Any:
        if self._group is None:
            bundle = {"CPU": self.max_colocate_count} | ({"GPU": 1} if self.use_gpu else {})
            self._group = placement_group([bundle] * sum(self.process_on_nodes))
        return self._group

    def remove(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)


class RayClassWithInitArgs:
    """A class, and what it is called with. It is not an actor's, and needs not derive from `Worker`."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        self.cls, self.args, self.kwargs = cls, args, kwargs


def with_model(cls: type) -> type:
    """Return a class whose objects have their model from the beginning: ranks that are started again, too."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        cls.__init__(self, *args, **kwargs)
        cls.init_model(self)  # type: ignore[attr-defined]

    return type(cls.__name__, (cls,), {"__init__": __init__, "init_model": lambda _: None})


class RayWorkerGroup:
    """The group. It has the registered methods of its class."""

    def __init__(
        self, resource_pool: RayResourcePool, ray_cls_with_init: RayClassWithInitArgs, *, max_restarts: int = 3
    ) -> None:
        kind, share = ray_cls_with_init.cls, 1 / resource_pool.max_colocate_count
        self.group = raylaunch.WorkerGroup(
            with_model(kind) if hasattr(kind, "init_model") else kind,
            *ray_cls_with_init.args,
            kwargs=ray_cls_with_init.kwargs,
            placement_group=resource_pool.placement_group(),
            nproc_per_node=1,
            gpus_per_worker=share if resource_pool.use_gpu else 0,
            max_restarts=max_restarts,
            show="none",
        )
        for name in dir(kind):
            registered = getattr(getattr(kind, name), "registered", None)
            if registered is not None:
                setattr(self, name, partialmethod(RayWorkerGroup._dispatch, name, registered).__get__(self))

    @property
    def world_size(self) -> int:
        return len(self.group)

    def _dispatch(self, name: str, how: Registered, *args: Any, **kwargs: Any) -> Any:
        if how.mode == "RANK_ZERO":
            pending = Pending(self.group.submit_one(0, name, *args, retry=how.retry, **kwargs))
        elif how.mode == "DP_COMPUTE_PROTO":
            parts = [raylaunch.scatter(batch.chunk(self.world_size)) for batch in args]
            named = {key: raylaunch.scatter(batch.chunk(self.world_size)) for key, batch in kwargs.items()}
            future = self.group.submit(name, *parts, retry=how.retry, **named)
            pending = Pending(future, lambda values: type(values[0]).concat(values))
        elif how.mode in ("ONE_TO_ALL", "ALL_TO_ALL", "DP_COMPUTE"):
            split = raylaunch.scatter if how.mode != "ONE_TO_ALL" else lambda value: value
            named = {key: split(value) for key, value in kwargs.items()}
            pending = Pending(self.group.submit(name, *map(split, args), retry=how.retry, **named))
        else:
            raise NotImplementedError(how.mode)  # Megatron's: which ranks get the same part, only the caller knows
        return pending.get() if how.blocking else pending

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Pending:
        return Pending(self.group.submit_one(0, method_name, *args, **kwargs))

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        return self.execute_rank_zero_async(method_name, *args, **kwargs).get()

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> Pending:
        """Call all ranks. If all arguments are lists of as many elements as ranks, each rank gets its own."""
        values = [*args, *kwargs.values()]
        if values and all(isinstance(value, list) and len(value) == self.world_size for value in values):
            args = tuple(map(raylaunch.scatter, args))
            kwargs = {key: raylaunch.scatter(value) for key, value in kwargs.items()}
        return Pending(self.group.submit(method_name, *args, **kwargs))

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self.execute_all_async(method_name, *args, **kwargs).get()


# A program.


@dataclass
class Batch:
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def chunk(self, chunks: int) -> "list[Batch]":
        parts = {key: tensor.chunk(chunks) for key, tensor in self.tensors.items()}
        return [Batch({key: values[index] for key, values in parts.items()}) for index in range(chunks)]

    @staticmethod
    def concat(batches: "list[Batch]") -> "Batch":
        return Batch({key: torch.cat([batch.tensors[key] for batch in batches]) for key in batches[0].tensors})


class Critic:
    elastic = True

    def __init__(self, lr: float) -> None:
        self.lr = lr

    @register("ONE_TO_ALL")
    def init_model(self) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr)
        self.state = raylaunch.worker.State(every=1, model=self.model, optimizer=self.optimizer)

    @register("DP_COMPUTE_PROTO", retry=True)
    @torch.no_grad()
    def compute_values(self, batch: Batch) -> Batch:
        return Batch({"values": self.model(batch.tensors["inputs"]).squeeze(1)})

    @register("DP_COMPUTE_PROTO")
    def update_critic(self, batch: Batch) -> Batch:
        loss = (self.model(batch.tensors["inputs"]).squeeze(1) - batch.tensors["returns"]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        done = self.state["done"] = self.state.get("done", 0) + 1
        self.state.commit(done - 1)
        return Batch({"loss": loss.detach()[None]})

    @register("RANK_ZERO")
    def steps_done(self) -> int:
        return self.state.get("done", 0)


def train(steps: int, kill_at: int = -1) -> float:
    pool = RayResourcePool([1, 1], use_gpu=False)
    critic = RayWorkerGroup(pool, RayClassWithInitArgs(Critic, lr=0.01))
    critic.init_model()
    step = 0
    while step < steps:
        inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))
        batch = Batch({"inputs": inputs, "returns": inputs.sum(1)})
        if step == kill_at:
            kill_at = -1
            os.kill(critic.group.ranks[1].pid, signal.SIGKILL)
        try:
            batch.tensors["advantages"] = batch.tensors["returns"] - critic.compute_values(batch).tensors["values"]
            loss = critic.update_critic(batch).tensors["loss"].mean().item()
        except raylaunch.RankRestartedError:
            step = critic.steps_done()
            print(f"a rank has died: resuming after step {step}", flush=True)
        else:
            step += 1
    critic.group.close()
    pool.remove()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kill", action="store_true", help="train twice, and kill a rank in the second")
    args = parser.parse_args()
    ray.init(log_to_driver=False)
    loss = train(args.steps)
    print(f"final loss {loss!r}")
    if args.kill:
        again = train(args.steps, kill_at=args.steps // 2)
        print(f"final loss {again!r}, with a rank killed in the middle")
        if again != loss:
            raise SystemExit("the losses differ")


if __name__ == "__main__":
    main()
