"""A loader of which each rank gets its own samples, and that goes on sample by sample with another number of ranks.

All ranks of all attempts take samples from one sequence: the shuffled epochs, one after another. The position in it is
one number, the same on all ranks, so any number of ranks can go on from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler

from raylaunch.worker import context


class ElasticSampler(Sampler[list[int]]):
    """The samples of this rank, batch by batch, from the position to the end of the epoch. It is a batch sampler.

    In a step each rank takes the next `batch_size` samples. Each sample of an epoch comes once, on one rank. The last
    steps of an epoch are smaller if its samples do not divide, and the ranks share them evenly. If fewer are left than
    there are ranks, the step is filled with the first samples of the next epoch. So each rank has a sample in each
    step, and all ranks do the same number of steps.

    Iteration does not move the position, since loaders read ahead; `advance` does, by a step.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """`size`: of the data set. `batch_size`: samples of a rank in a step. `seed`: must be the same on all ranks.

        `num_replicas`, `rank`: how many ranks take samples, and which of them this one is. None: all of the default
        process group or, where there is none, of the environment, at the time of the iteration.

        Raises ValueError for a batch size or a data set below 1.
        """
        if batch_size < 1 or size < 1:
            msg = f"`batch_size` and the size of the data set must be 1 or more; got {batch_size} and {size}"
            raise ValueError(msg)
        self._size, self._batch_size, self._shuffle, self._seed = size, batch_size, shuffle, seed
        self._num_replicas, self._rank = num_replicas, rank
        #: How many samples of the sequence all ranks have taken together, and in how many steps they took this epoch's.
        self._position = self._steps = 0
        #: Of an epoch, the shuffled indices.
        self._order = -1, torch.empty(0)

    @property
    def position(self) -> int:
        """How many samples all ranks have taken together, through all epochs and attempts."""
        return self._position

    @property
    def epoch(self) -> int:
        """Which epoch the next sample belongs to, from 0 on."""
        return self._position // self._size

    @property
    def epochs_done(self) -> float:
        """How many epochs all ranks have taken together, with the part of this one."""
        return self._position / self._size

    @property
    def steps_left(self) -> int:
        """How many steps of this epoch are left."""
        return sum(1 for _ in pairwise(self._steps_of_epoch(self._world()[0])))

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each step. Raises ValueError if the data set has fewer samples than there are ranks."""
        ranks, rank = self._world()
        for begin, end in pairwise(self._steps_of_epoch(ranks)):
            first, last = (begin + (end - begin) * number // ranks for number in (rank, rank + 1))
            yield self._indices(first, last)

    def __len__(self) -> int:
        """Return the number of steps of this epoch, with those that are done."""
        return self._steps + self.steps_left

    def advance(self) -> None:
        """Move the position of all ranks by a step. Each rank must call this for each batch that it uses."""
        epoch, steps = self.epoch, self._steps_of_epoch(self._world()[0])
        next(steps)
        self._position = next(steps)
        self._steps = self._steps + 1 if self.epoch == epoch else 0

    def state_dict(self) -> dict[str, int]:
        """Return the position, which does not depend on the number of ranks."""
        return {"position": self._position, "steps": self._steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self._position, self._steps = state["position"], state["steps"]

    def _world(self) -> tuple[int, int]:
        """Return how many ranks there are, and which of them this one is."""
        if dist.is_available() and dist.is_initialized():
            ranks, rank = dist.get_world_size(), dist.get_rank()
        else:
            ranks, rank = context().world_size, context().rank
        ranks = ranks if self._num_replicas is None else self._num_replicas
        if self._size < ranks:
            msg = f"the data set has {self._size} samples for {ranks} ranks: each rank needs one in each step"
            raise ValueError(msg)
        return ranks, rank if self._rank is None else self._rank

    def _steps_of_epoch(self, ranks: int) -> Iterator[int]:
        """Yield the position now, and after each further step until the epoch has ended."""
        position, end = self._position, (self.epoch + 1) * self._size
        whole = ranks * self._batch_size
        yield position
        while position < end:
            left = end - position
            if left >= whole + ranks or left == whole:
                position += whole
            elif left > whole and left >= 2 * ranks:
                position += left - ranks  # so that each rank has one sample in the last step
            else:
                position += max(min(left, whole), ranks)
            yield position

    def _indices(self, first: int, last: int) -> list[int]:
        """Return which samples of the data set have these numbers in the sequence."""
        epoch, offset = divmod(first, self._size)
        indices: list[int] = self._epoch_order(epoch)[offset : offset + last - first].tolist()
        if len(indices) < last - first:
            indices += self._indices(first + len(indices), last)
        return indices

    def _epoch_order(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._size)
        if self._order[0] != epoch:
            self._order = epoch, torch.randperm(self._size, generator=torch.Generator().manual_seed(self._seed + epoch))
        return self._order[1]


class ElasticDataLoader(DataLoader[Any]):
    """A `DataLoader` with an `ElasticSampler`, whose position can be part of a `State`.

        loader = ElasticDataLoader(dataset, batch_size=32)
        state = State(model=model, optimizer=optimizer, loader=loader)
        step = state.restore()
        while loader.epoch < epochs:
            for batch in loader:
                ...
                state.commit(step)
                step += 1

    An iteration goes from the position to the end of the epoch. The position counts batches that the loop has got, also
    with workers that read ahead, so commit after the step and before the next batch. It draws nothing from torch's
    default generator: a script that goes on has the same random numbers as one that was not interrupted.
    """

    def __init__(
        self, dataset: Dataset[Any], batch_size: int = 1, *, shuffle: bool = True, seed: int = 0, **more: Any
    ) -> None:
        """`batch_size`: of each rank. `seed`: of the order. `more`: other arguments of `DataLoader`, for example
        `num_workers`; and `num_replicas` and `rank`, see `ElasticSampler`.
        """
        world = {name: more.pop(name, None) for name in ("num_replicas", "rank")}
        self._seed = seed
        self.elastic_sampler = ElasticSampler(len(dataset), batch_size, shuffle=shuffle, seed=seed, **world)
        self._own_generator = torch.Generator()
        super().__init__(dataset, batch_sampler=self.elastic_sampler, **{"generator": self._own_generator} | more)

    @property
    def epoch(self) -> int:
        """Which epoch the next sample belongs to, from 0 on."""
        return self.elastic_sampler.epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches that are left of this epoch, and count them."""
        self._own_generator.manual_seed(self._seed + self.elastic_sampler.position)  # for the seeds of workers
        for batch in super().__iter__():
            self.elastic_sampler.advance()
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return self.elastic_sampler.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there, with the next iteration."""
        self.elastic_sampler.load_state_dict(state)
