"""`State` in workers of one node, whose number changes from attempt to attempt."""

from __future__ import annotations

import pytest

from tests.worker.state.test_elastic_state import attempt

TRAINS = '''
    import os, random, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from raylaunch.worker import State

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for seed in (random.seed, torch.manual_seed):
        seed(7)
    sharded = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 2))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (size,)))
    plain = DistributedDataParallel(nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.2)))
    both = [*sharded.parameters()], [*plain.parameters()]
    adam, sgd = torch.optim.AdamW(both[0], lr=0.1), torch.optim.SGD(both[1], lr=0.1, momentum=0.9)
    decay = torch.optim.lr_scheduler.StepLR(adam, 2)
    kinds = {"sharded": (sharded, adam), "plain": (plain, sgd)}[sys.argv[1]]
    random.seed(rank)
    torch.manual_seed(rank)

    def whole(tensor):
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()

    def everything():
        """The parameters and the state of the optimizer, of all ranks together."""
        found = [whole(one.detach()) for one in kinds[0].parameters()]
        for parameter in kinds[0].parameters():
            for name, value in sorted(kinds[1].state[parameter].items()):
                found.append(whole(value))
        return found

    state = State(model=kinds[0], optimizer=kinds[1], decay=decay, every=1)
    done = state.restore()
    if done:
        was = torch.load("whole.pt")
        now = everything()
        same = len(was) == len(now) and all(torch.equal(a, b) for a, b in zip(was, now))
        print(done, same, decay.last_epoch, state["rank"], kinds[1].state_dict()["param_groups"][0]["lr"])
        print(random.random(), torch.rand(1).item())
    for step in range(done, done + 3):
        loss = kinds[0](torch.randn(4, 6)).square().mean()
        kinds[1].zero_grad()
        loss.backward()
        kinds[1].step()
        decay.step()
        state["rank"] = rank
        state.commit(step)
    print(random.random(), torch.rand(1).item())
    found = everything()
    if rank == 0:
        torch.save(found, "whole.pt")
    dist.barrier()
    raise SystemExit(1)
'''


@pytest.mark.parametrize(("kind", "sizes"), [("sharded", (2, 3, 1)), ("plain", (1, 2))])
def test_training_goes_on_in_a_world_of_another_size(state_node, kind, sizes):
    """Parameters and optimizer are bitwise those that were committed, and each rank follows one of the old world."""
    script = state_node.script(TRAINS)
    printed: dict[int, list[str]] = {}
    for number, size in enumerate(sizes):
        before, printed = printed, {}
        attempt(state_node, script, kind, nproc=size, port=state_node.open_store())
        for rank in range(size):
            printed[rank] = (state_node.rank_folder(rank) / "stdout.log").read_text().splitlines()
        if number:
            for rank in range(size):
                restored = printed[rank][0].split()
                assert restored[:4] == [str(3 * number), "True", str(3 * number), str(rank % len(before))]
                goes_on = printed[rank][1] == before.get(rank, [""])[-1]
                assert goes_on == (rank in before), "its random numbers, or others if there was no such rank"
            assert len({lines[1] for lines in printed.values()}) == size
